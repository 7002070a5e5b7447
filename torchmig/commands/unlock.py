"""``torchmig unlock``: remove locks that nobody holds any more."""

import argparse

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output


class Unlock(Command):
    """Remove the locks of processes that have gone.

    A lock is stale when its process on this host has ended, or when it has not been refreshed for
    half an hour. --all removes the others as well: only when nothing is at work for certain.
    """

    groups = (Group.REPOSITORY,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the switch for living locks."""
        parser.add_argument("--all", action="store_true", help="remove locks that are not stale")

    def run(self, options: argparse.Namespace) -> int | None:
        """Remove them and print what was found."""
        from torchmig.commands._repository import opened
        from torchmig.repo.locks import read_locks

        with opened(options) as repo:
            found = read_locks(repo.store)
            removed = [info for info in found if options.all or info.is_stale]
            for info in removed:
                repo.store.delete(info.name)
        Output(options.json).document(
            [
                {
                    "lock": info.name,
                    "kind": str(info.kind),
                    "purpose": info.purpose,
                    "created": info.created,
                    "host": info.owner.host if info.owner else None,
                    "pid": info.owner.pid if info.owner else None,
                    "age_seconds": round(info.age_seconds, 3),
                    "removed": info in removed,
                }
                for info in found
            ],
            [
                f"{'removed' if info in removed else 'kept'} the lock of {info.describe()}"
                for info in found
            ]
            or ["there are no locks"],
        )
        return None
