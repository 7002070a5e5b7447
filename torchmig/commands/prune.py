"""``torchmig prune``: free what no snapshot uses."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.errors import UsageError
from torchmig.progress import make_progress
from torchmig.units import format_size, parse_duration

if TYPE_CHECKING:
    from torchmig.repo import Repository


class Prune(Command):
    """Delete blobs that no snapshot uses, and what broken uploads left.

    Packs that are partly used are rewritten until at most --max-unused of the used bytes is waste.
    While an upload runs the repository is locked: exit code 11, or wait with --wait.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the limits."""
        parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
        parser.add_argument(
            "--max-unused", default="5%", metavar="N%", help="waste that may stay (default 5%%)"
        )
        parser.add_argument(
            "--wait", type=parse_duration, default=0.0, metavar="TIME", help="wait for uploads"
        )

    def run(self, options: argparse.Namespace) -> int | None:
        """Prune and print what was freed."""
        from torchmig.commands._repository import opened

        try:
            max_unused = float(options.max_unused.removesuffix("%")) / 100
        except ValueError:
            max_unused = -1.0
        if not 0 <= max_unused <= 1:
            raise UsageError(f"cannot read --max-unused {options.max_unused!r}: write it as 5%")
        with opened(options) as repo:
            prune_and_print(repo, options, max_unused)
        return None


def prune_and_print(repo: "Repository", options: argparse.Namespace, max_unused: float) -> None:
    """Prune and print what was freed; also for ``forget --prune``."""
    from torchmig.repo.prune import prune

    progress = make_progress(options.json, options.quiet)
    with progress.phase("prune") as phase:
        report = prune(
            repo,
            dry_run=options.dry_run,
            max_unused=max_unused,
            wait_seconds=getattr(options, "wait", 0.0),
            advance=phase.advance,
        )
    would = "would free" if report.dry_run else "freed"
    Output(options.json).message(
        "summary",
        asdict(report),
        f"{would} {format_size(report.freed_bytes)}: {report.deleted_packs} packs deleted "
        f"({report.repacked_packs} after copying what is used, {report.unknown_packs} from broken "
        f"uploads), {report.kept_packs} kept; {format_size(report.used_bytes)} in use",
    )
