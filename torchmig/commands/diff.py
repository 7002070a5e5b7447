"""``torchmig diff``: what changed from one snapshot to another."""

import argparse
from dataclasses import asdict

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.units import format_size


class Diff(Command):
    """Compare two snapshots: for each rank, how many bytes only one of them has, and how many both.

    Bytes that another rank of the other snapshot has count as common: they are stored once.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add both snapshots."""
        from torchmig.commands._repository import add_job

        parser.add_argument("first", metavar="A", help="a snapshot")
        parser.add_argument("second", metavar="B", help="another one, by default later")
        add_job(parser)

    def run(self, options: argparse.Namespace) -> int | None:
        """Print the table."""
        from torchmig.commands._repository import opened
        from torchmig.repo.survey import compare

        with opened(options) as repo:
            first = repo.load(options.first, options.job)
            second = repo.load(options.second, options.job)
            found = compare(repo, first, second)
        Output(options.json).table(
            ("rank", "kind", f"only in {first.id[:8]}", f"only in {second.id[:8]}", "in both"),
            [
                (
                    "all" if each.rank is None else str(each.rank),
                    each.kind,
                    format_size(each.removed_bytes),
                    format_size(each.added_bytes),
                    format_size(each.common_bytes),
                )
                for each in found
            ],
            [asdict(each) for each in found],
        )
        return None
