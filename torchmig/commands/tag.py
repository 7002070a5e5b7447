"""``torchmig tag``: put words on a snapshot."""

import argparse

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output


class Tag(Command):
    """Add tags to a snapshot or take some away, for filters and for 'forget --keep-tag'.

    The id of a snapshot covers all that it says, so it changes with the tags; 'show' still tells
    the original one.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the snapshot and the tags."""
        from torchmig.commands._repository import add_snapshot

        add_snapshot(parser)
        parser.add_argument("--add", action="append", default=[], metavar="TAG")
        parser.add_argument("--remove", action="append", default=[], metavar="TAG")

    def run(self, options: argparse.Namespace) -> int | None:
        """Change the tags and print the new id."""
        from torchmig.commands._repository import opened

        with opened(options) as repo:
            manifest = repo.load(options.snapshot, options.job)
            tags = sorted((set(manifest.tags) | set(options.add)) - set(options.remove))
            snapshot_id = manifest.id
            if tags != sorted(manifest.tags):
                snapshot_id = repo.retag(manifest, tags)
        Output(options.json).document(
            {"id": snapshot_id, "previous_id": manifest.id, "tags": tags},
            [f"{snapshot_id[:8]} (was {manifest.id[:8]}): {', '.join(tags) or 'no tags'}"],
        )
        return None
