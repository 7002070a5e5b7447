"""``torchmig stats``: how much is stored for how much."""

import argparse
from dataclasses import asdict

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.units import format_size


class Stats(Command):
    """Show what snapshots would restore to, what is stored for that, and the ratios between.

    Without ids all snapshots are counted, and what no snapshot uses any more is shown as well.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the snapshots."""
        from torchmig.commands._repository import add_job

        parser.add_argument("snapshots", nargs="*", metavar="ID", help="count these only")
        add_job(parser)

    def run(self, options: argparse.Namespace) -> int | None:
        """Print the figures."""
        from torchmig.commands._repository import chosen, opened
        from torchmig.repo.survey import count

        with opened(options) as repo:
            summaries = chosen(repo, options.snapshots, options.job)
            found = count(repo, [repo.load(summary.id) for summary in summaries])
        Output(options.json).document(
            {
                **asdict(found),
                "deduplication_ratio": found.deduplication_ratio,
                "compression_ratio": found.compression_ratio,
            },
            [
                f"snapshots      {found.snapshots}",
                f"restore size   {format_size(found.restore_bytes)}",
                f"different      {format_size(found.unique_bytes)} in {found.blobs} blobs "
                f"(deduplication {found.deduplication_ratio:.2f}x)",
                f"stored         {format_size(found.stored_bytes)} "
                f"(compression {found.compression_ratio:.2f}x)",
                f"in the store   {format_size(found.repository_bytes)} in {found.objects} objects",
            ],
        )
        return None
