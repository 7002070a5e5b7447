"""``torchmig checkpoint``: a snapshot of a job that goes on."""

import argparse

from torchmig.commands import Command
from torchmig.commands._jobs import add_request_arguments, request
from torchmig.config import Group


class Checkpoint(Command):
    """Checkpoint a running job, which then goes on.

    Asks the job's agent on this host, and returns once the snapshot is durable.
    """

    groups = (Group.JOB,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the job and the deadline."""
        add_request_arguments(parser)

    def run(self, options: argparse.Namespace) -> int | None:
        """Ask and wait."""
        request("checkpoint", options)
        return None
