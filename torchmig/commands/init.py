"""``torchmig init``: make a repository."""

import argparse

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output


class Init(Command):
    """Make a repository at the address given by --repo.

    A folder or bucket that is not there is made; a repository that is there already stays as it is.
    """

    groups = (Group.REPOSITORY,)

    def run(self, options: argparse.Namespace) -> int | None:
        """Make it."""
        from torchmig.repo import Repository

        with Repository.open(options.repo, create=True, make_bucket=True) as repo:
            Output(options.json).document({"repository": repo.url}, [f"repository at {repo.url}"])
        return None
