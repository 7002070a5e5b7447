"""Where `torchmig-run` begins: a restore's bytes are on their way before torch is imported."""

import argparse
import contextlib
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchmig.config import Group, add_options, fill
from torchmig.errors import TorchmigError, UsageError

if TYPE_CHECKING:
    from torchmig.agent.loader import Loader
    from torchmig.repo import Depot


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    loader = None
    told: list[int] = []  # signals that have ended the program early
    with contextlib.suppress(TorchmigError, OSError):  # the program itself will say it
        loader = start_loader(given)
    if loader is not None:
        _end_with_cleanup(told)
    try:
        from torchmig.agent import main as program

        return program.main(given, loader)
    except BaseException:
        if not told:
            raise
        return 128 + told[0]  # whatever an import has made of the exception
    finally:
        if loader is not None:
            loader.close()


def start_loader(argv: Sequence[str]) -> "Loader | None":
    """Have a snapshot loaded if the arguments ask for a restore.

    Raises:
        TorchmigError: The arguments, the environment or the configuration cannot be understood.
    """
    parser = _Quiet(add_help=False)
    add_options(parser, Group.RUN)
    # torchrun's own options are not known here. A script's `--restore` may be taken for ours: then
    # something is loaded that nobody takes, until the program has understood its arguments.
    arguments, _ = parser.parse_known_args(argv)
    fill(arguments, [Group.RUN])
    if arguments.restore is None:
        return None
    from torchmig.agent import workfolders
    from torchmig.agent.loader import Loader, Request

    request = Request(
        depot=depot_of(arguments).to_dict(),
        reference=arguments.restore,
        job=arguments.job,
        ranks=None,
        host=socket.gethostname(),
        staging_bytes=arguments.staging,
        criu=arguments.criu,
    )
    return Loader(request, workfolders.make(arguments.work_dir))


def depot_of(arguments: argparse.Namespace) -> "Depot":
    """Return where the command line has snapshots go."""
    from torchmig.repo import Depot
    from torchmig.store import absolute

    # Whoever asks this agent where its snapshots are may be in another folder.
    address = absolute(str(arguments.repo))
    cache = str(Path(arguments.local_cache).resolve()) if arguments.local_cache else None
    return Depot(address, cache, arguments.local_cache_size)


def _end_with_cleanup(told: list[int]) -> None:
    """Have signals end the program by an exception, until it has handlers of its own.

    Args:
        told: Takes their numbers.
    """

    def end(number: int, _frame: object) -> NoReturn:
        told.append(number)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
