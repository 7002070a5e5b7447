"""Where `torchmig-run` begins.

Importing torch takes seconds in which disks have nothing to do. What a restore needs is read from
its repository meanwhile, where that is a folder, so that it lies in the page cache; by a process,
since loading torch's libraries keeps the interpreter to itself.
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from torchmig.config import Group, add_options, fill
from torchmig.errors import TorchmigError, UsageError
from torchmig.host import available_bytes

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
    most = str(int(available_bytes() * _SHARE))
    what = (address, known.restore, known.job or "", socket.gethostname())
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "torchmig.repo.readahead", *what, most],
        stdin=subprocess.PIPE,  # it ends with us
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's signals are for us
    )
    threading.Thread(target=_wait, args=(process,), name="read-ahead", daemon=True).start()


def _wait(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.wait()


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
