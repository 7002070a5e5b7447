"""``torchmig rebuild-index``: make the index anew from the packs."""

import argparse

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.errors import ExitCode
from torchmig.progress import make_progress
from torchmig.units import parse_duration


class RebuildIndex(Command):
    """Make the index of a repository anew from its packs, if 'check' finds it damaged.

    No data is lost or read in full. Packs that are damaged themselves are named and left out, and
    the exit code is 22.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add how long to wait."""
        parser.add_argument(
            "--wait", type=parse_duration, default=0.0, metavar="TIME", help="wait for uploads"
        )

    def run(self, options: argparse.Namespace) -> int | None:
        """Rebuild and print what was found."""
        from torchmig.commands._repository import opened
        from torchmig.repo.rebuild import rebuild_index

        progress = make_progress(options.json, options.quiet)
        with opened(options) as repo, progress.phase("rebuild") as phase:
            report = rebuild_index(repo, wait_seconds=options.wait, advance=phase.advance)
        output = Output(options.json)
        for reason in report.skipped:
            output.message("problem", {"reason": reason}, reason)
        output.message(
            "summary",
            {"packs": report.packs, "blobs": report.blobs, "skipped": len(report.skipped)},
            f"{report.blobs} blobs in {report.packs} packs are indexed, "
            f"{len(report.skipped)} packs left out",
        )
        return int(ExitCode.INTEGRITY) if report.skipped else None
