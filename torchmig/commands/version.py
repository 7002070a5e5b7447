"""``torchmig version``: which releases work together here."""

import argparse
import platform
from importlib import metadata

from torchmig import __version__
from torchmig.commands import Command
from torchmig.console import Output


class Version(Command):
    """Print the versions of torchmig, Python and torch."""

    def run(self, options: argparse.Namespace) -> int | None:
        """Print them without importing torch, which takes seconds."""
        versions = {
            "torchmig": __version__,
            "python": platform.python_version(),
            "torch": _installed("torch"),
        }
        output = Output(options.json)
        output.document(versions, [f"{name} {version}" for name, version in versions.items()])
        return None


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
