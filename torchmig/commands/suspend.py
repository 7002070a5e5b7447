"""``torchmig suspend``: a snapshot of a job that ends with it."""

import argparse

from torchmig.commands import Command
from torchmig.commands._jobs import add_request_arguments, request
from torchmig.config import Group


class Suspend(Command):
    """Suspend a running job: checkpoint it and stop it.

    Asks the job's agent on this host, and returns once the snapshot is durable. The job's
    torchmig-run then ends with 85, and 'torchmig-run --restore' goes on from there.
    """

    groups = (Group.JOB,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the job and the deadline."""
        add_request_arguments(parser)

    def run(self, options: argparse.Namespace) -> int | None:
        """Ask and wait."""
        request("suspend", options)
        return None
