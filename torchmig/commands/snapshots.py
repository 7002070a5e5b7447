"""``torchmig snapshots``: which snapshots there are."""

import argparse
from typing import TYPE_CHECKING

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.units import format_size

if TYPE_CHECKING:
    from torchmig.repo import Summary


class Snapshots(Command):
    """List the snapshots of a repository, the newest last.

    The filters may be combined. TIME is a date such as 2026-01-31 or a time such as
    2026-01-31T12:00 in UTC.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the filters."""
        from torchmig.commands._repository import add_job

        add_job(parser)
        parser.add_argument("--host", metavar="NAME", help="only snapshots with a rank there")
        parser.add_argument("--tag", metavar="TAG", help="only snapshots with this tag")
        parser.add_argument("--since", metavar="TIME", help="only snapshots not older than this")
        parser.add_argument("--before", metavar="TIME", help="only snapshots older than this")
        parser.add_argument(
            "--latest", metavar="N", type=int, help="only the last N, of each group if grouped"
        )
        parser.add_argument(
            "--group-by", choices=("job", "host"), help="one list for each job or set of hosts"
        )

    def run(self, options: argparse.Namespace) -> int | None:
        """Print the list or lists."""
        from torchmig.commands._repository import opened, summary_document

        with opened(options) as repo:
            summaries = [each for each in repo.snapshots(options.job) if _fits(each, options)]
        groups: dict[str, list[Summary]] = {}
        for summary in summaries:
            groups.setdefault(_group(summary, options.group_by), []).append(summary)
        if options.latest is not None:
            groups = {name: found[-options.latest :] for name, found in groups.items()}
        output = Output(options.json)
        if options.group_by is None:
            _print(output, groups.get("", []))
            return None
        if options.json:
            documents = [
                {"group": {options.group_by: name}, "snapshots": list(map(summary_document, found))}
                for name, found in groups.items()
            ]
            output.document(documents, [])
            return None
        for name, found in groups.items():
            output.document(None, [f"{options.group_by} {name}"])
            _print(output, found)
        return None


def _fits(summary: "Summary", options: argparse.Namespace) -> bool:
    return (
        (options.host is None or options.host in summary.node_names)
        and (options.tag is None or options.tag in summary.tags)
        # The times are written so that they sort as text, parts of them too.
        and (options.since is None or summary.created >= options.since)
        and (options.before is None or summary.created < options.before)
    )


def _group(summary: "Summary", by: str | None) -> str:
    if by == "job":
        return summary.job.name
    return ", ".join(summary.node_names) if by == "host" else ""


def _print(output: Output, summaries: list["Summary"]) -> None:
    from torchmig.commands._repository import printable, summary_document, when

    output.table(
        ("id", "time (UTC)", "job", "kind", "ranks", "size", "hosts", "tags"),
        [
            (
                each.id[:8],
                when(each.created),
                printable(each.job.name),
                each.kind,
                str(each.world_size),
                format_size(each.size_bytes),
                ",".join(each.node_names),
                ",".join(each.tags),
            )
            for each in summaries
        ],
        [summary_document(each) for each in summaries],
    )
