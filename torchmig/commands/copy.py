"""``torchmig copy``: bring snapshots into another repository."""

import argparse

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.progress import make_progress
from torchmig.units import format_size


class Copy(Command):
    """Copy snapshots to another repository, which is made if it is not there (a bucket is not).

    Ids stay the same. What the other repository has already is not sent, so that a copy that was
    broken off goes on where it was. Without ids all snapshots are copied.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the target and the snapshots."""
        from torchmig.commands._repository import add_job

        parser.add_argument("snapshots", nargs="*", metavar="ID", help="copy these only")
        parser.add_argument("--to", required=True, metavar="URL", help="the other repository")
        add_job(parser)

    def run(self, options: argparse.Namespace) -> int | None:
        """Copy and print one line a snapshot."""
        from torchmig.commands._repository import chosen, opened
        from torchmig.repo import Repository
        from torchmig.repo.copy import copy_snapshot

        output = Output(options.json)
        with opened(options) as source, Repository.open(options.to, create=True) as target:
            summaries = chosen(source, options.snapshots, options.job)
            progress = make_progress(options.json, options.quiet)
            for summary in summaries:
                with progress.phase(f"copy {summary.id[:8]}", summary.size_bytes) as phase:
                    report = copy_snapshot(source, target, summary.id, phase.advance)
                line = (
                    f"{summary.id[:8]} is there already"
                    if report.was_there
                    else f"{summary.id[:8]} copied, {format_size(report.sent_bytes)} sent"
                )
                output.message(
                    "snapshot",
                    {
                        "id": summary.id,
                        "was_there": report.was_there,
                        "sent_bytes": report.sent_bytes,
                        "blobs": report.sent_blobs,
                    },
                    line,
                )
            output.message("summary", {"snapshots": len(summaries), "to": target.url}, None)
        return None
