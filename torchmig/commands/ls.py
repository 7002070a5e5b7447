"""``torchmig ls``: what a snapshot holds."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.units import format_size

if TYPE_CHECKING:
    from torchmig.repo import Manifest


class Ls(Command):
    """List what a snapshot holds, for each rank and kind: host pages, GPU blocks, images, files.

    'size' is without holes and zeros; 'shared' is the part of it whose bytes another rank of the
    snapshot has as well, so that they are stored once. --streams lists each stream.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the snapshot and the switch for detail."""
        from torchmig.commands._repository import add_snapshot

        add_snapshot(parser)
        parser.add_argument("--streams", action="store_true", help="list each stream")

    def run(self, options: argparse.Namespace) -> int | None:
        """Print the table."""
        from torchmig.commands._repository import opened
        from torchmig.repo.survey import holdings

        output = Output(options.json)
        with opened(options) as repo:
            manifest = repo.load(options.snapshot, options.job)
            if options.streams:
                _print_streams(output, manifest)
                return None
            found = holdings(repo, manifest)
        output.table(
            ("rank", "kind", "streams", "size", "shared", "stored"),
            [
                (
                    str(each.rank),
                    each.kind,
                    str(each.streams),
                    format_size(each.size_bytes),
                    format_size(each.shared_bytes),
                    format_size(each.stored_bytes),
                )
                for each in found
            ],
            [asdict(each) for each in found],
        )
        return None


def _print_streams(output: Output, manifest: "Manifest") -> None:
    from torchmig.commands._repository import printable

    streams = [(rank.rank, stream) for rank in manifest.ranks for stream in rank.streams]
    output.table(
        ("rank", "kind", "mode", "size", "length", "name"),
        [
            (
                str(rank),
                stream.kind,
                f"{stream.mode:04o}",
                format_size(stream.data_bytes),
                str(stream.size_bytes),
                printable(stream.name),
            )
            for rank, stream in streams
        ],
        [
            {
                "rank": rank,
                "kind": stream.kind,
                "name": printable(stream.name),
                "mode": stream.mode,
                "size_bytes": stream.data_bytes,
                "length_bytes": stream.size_bytes,
                "chunks": stream.extent_count,
            }
            for rank, stream in streams
        ],
    )
