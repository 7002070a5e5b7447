"""``torchmig check``: is everything there, and does it match its hash."""

import argparse
from typing import TYPE_CHECKING

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.errors import ExitCode
from torchmig.progress import make_progress
from torchmig.units import format_size

if TYPE_CHECKING:
    from torchmig.repo.check import CheckReport


class Check(Command):
    """Check the repository: that all snapshots can be read and all their blobs are there.

    With --read-data every stored byte is read and compared with its hash, with --read-data-subset
    a share of the packs (5%) or one of several equal parts (2/7). Damage is printed with the
    snapshots that it hits, and the exit code is 22.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add how much is read."""
        amount = parser.add_mutually_exclusive_group()
        amount.add_argument("--read-data", action="store_true", help="read every byte")
        amount.add_argument("--read-data-subset", metavar="N%|n/t", help="read a part of the packs")

    def run(self, options: argparse.Namespace) -> int | None:
        """Check and print what was found."""
        from torchmig.commands._repository import opened
        from torchmig.repo.check import Checker, Subset

        read = Subset() if options.read_data else None
        if options.read_data_subset:
            read = Subset.parse(options.read_data_subset)
        progress = make_progress(options.json, options.quiet)
        with opened(options) as repo, progress.phase("check") as phase:
            report = Checker(repo).run(read, phase.advance)
        _print(Output(options.json), report)
        return int(ExitCode.INTEGRITY) if report.problems else None


def _print(output: Output, report: "CheckReport") -> None:
    for problem in report.problems:
        output.message(
            "problem",
            {
                "object": problem.name,
                "reason": problem.reason,
                "snapshots": list(problem.snapshot_ids),
            },
            str(problem),
        )
    verdict = f"{len(report.problems)} problems" if report.problems else "no problems"
    output.message(
        "summary",
        {
            "snapshots": report.snapshots,
            "packs": report.packs,
            "blobs": report.blobs,
            "read_packs": report.read_packs,
            "read_bytes": report.read_bytes,
            "unused_objects": len(report.unused_objects),
            "problems": len(report.problems),
        },
        f"{report.snapshots} snapshots, {report.blobs} blobs in {report.packs} packs, "
        f"{format_size(report.read_bytes)} read: {verdict}",
    )
    if report.unused_objects and not output.as_json:
        count = len(report.unused_objects)
        output.message("note", {}, f"{count} objects are in no index; 'torchmig prune' frees them")
