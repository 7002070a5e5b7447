"""``torchmig checkpoint``: a snapshot of a job that goes on."""

import argparse

from torchmig.commands import Command
from torchmig.commands._jobs import add_request_arguments, request
from torchmig.config import Group


class Checkpoint(Command):
    """Checkpoint a running job, which then goes on.

    Asks the job's agent on this host, and returns once the snapshot is durable. With '--dry-run'
    all ranks only stand still together until nothing moves between them, and go on: it tells
    whether the job can be stopped, where it stood and how long that took. Nothing is written.
    """

    groups = (Group.JOB,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the job, the deadline and what only tries."""
        add_request_arguments(parser)
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="stop all ranks at one point, say where and how fast, and let them go on",
        )

    def run(self, options: argparse.Namespace) -> int | None:
        """Ask and wait."""
        request("dry-run" if options.dry_run else "checkpoint", options)
        return None
