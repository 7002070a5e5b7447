"""``torchmig show``: what a snapshot says about itself."""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.units import format_size

if TYPE_CHECKING:
    from torchmig.repo import Manifest


class Show(Command):
    """Show one snapshot: its job, how it was launched, its environment, ranks and times.

    With --json that is the whole manifest, but for the list of what is stored (see 'ls').
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the snapshot."""
        from torchmig.commands._repository import add_snapshot

        add_snapshot(parser)

    def run(self, options: argparse.Namespace) -> int | None:
        """Print it."""
        from torchmig.commands._repository import opened

        with opened(options) as repo:
            manifest = repo.load(options.snapshot, options.job)
        Output(options.json).document(_document(manifest), _lines(manifest))
        return None


def _document(manifest: "Manifest") -> dict[str, Any]:
    from torchmig.commands._repository import jsonable

    document: dict[str, Any] = jsonable(
        {
            "id": manifest.id,
            "version": manifest.version,
            "job": {"name": manifest.job.name, "id": manifest.job.id},
            "kind": manifest.kind,
            "created": manifest.created,
            "launch": manifest.launch,
            "environment": manifest.environment,
            "nodes": manifest.nodes,
            "ranks": [
                {
                    "rank": rank.rank,
                    "node": rank.node,
                    "pid": rank.pid,
                    "streams": len(rank.streams),
                    "size_bytes": sum(stream.data_bytes for stream in rank.streams),
                    "state": rank.state,
                }
                for rank in manifest.ranks
            ],
            "store_keys": manifest.store_keys,
            "report": manifest.report,
            "tags": manifest.tags,
            "original": manifest.original,
        }
    )
    return document


def _lines(manifest: "Manifest") -> Iterator[str]:
    from torchmig.commands._repository import printable, when

    yield f"snapshot     {manifest.id}"
    yield printable(f"job          {manifest.job.name} ({manifest.job.id})")
    yield f"kind         {manifest.kind}"
    yield f"created      {when(manifest.created)} UTC"
    if manifest.tags:
        yield f"tags         {', '.join(manifest.tags)}"
    for title, content in (
        ("launch", manifest.launch),
        ("environment", manifest.environment),
        ("report", manifest.report),
    ):
        if content:
            yield title
            yield from _entries(content)
    yield "ranks"
    for rank in manifest.ranks:
        size = format_size(sum(stream.data_bytes for stream in rank.streams))
        yield f"  {rank.rank}  on {rank.node}, pid {rank.pid}: {size}, {len(rank.streams)} streams"


def _entries(content: dict[str, Any]) -> Iterator[str]:
    from torchmig.commands._repository import jsonable, printable

    width = max(len(str(key)) for key in content)
    for key, value in content.items():
        text = value if isinstance(value, str) else json.dumps(jsonable(value))
        yield printable(f"  {str(key).ljust(width)}  {text}")
