"""Where `torchmig-run` begins.

Importing torch takes seconds in which disks have nothing to do. A restore's bytes are read from
its repository meanwhile, where that is a folder, so that they wait in the page cache.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchmig.config import Group, add_options, fill
from torchmig.errors import TorchmigError, UsageError

_SHARE = 0.5  # of the memory that is available


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(TorchmigError):  # the program itself will say it
        read_ahead(given)
    from torchmig.agent import main as program

    return program.main(given)


def read_ahead(argv: Sequence[str]) -> None:
    """Begin to read what a restore with these arguments will need; return at once.

    Raises:
        TorchmigError: The arguments, the environment or the configuration cannot be understood.
    """
    arguments = _Quiet(add_help=False)
    add_options(arguments, Group.RUN)
    # torchrun's own options are not known here. A script's `--restore` may be taken for ours:
    # then something is read that nobody needs.
    known, _ = arguments.parse_known_args(argv)
    fill(known, [Group.RUN])
    if known.restore is None:
        return
    address = known.local_cache or str(known.repo)
    if "://" in address and not address.startswith("file:"):
        return
    # Imported here, for restores alone, and by this thread: torch imports some of the same modules.
    from torchmig.host import available_bytes
    from torchmig.repo.readahead import ReadAhead

    ReadAhead(address, known.restore, known.job, int(available_bytes() * _SHARE)).start()


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
