"""Processes that bring windows from a repository into staging, side by side.

Threads of one interpreter hand its lock to one another some ten times a blob, and that takes the
longer the more of them there are: `benchmarks.bench_load` compares both, and docs/gpu.md has what
that gave.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from torchmig.agent.inflow import Bring, Lane
from torchmig.errors import TorchmigError, from_message, to_message
from torchmig.repo import Reader

THREADS = 2
"""Of each process's reader: one waits for the disk while the other one unpacks."""

_MOST = 16
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")  # what has been read of the repository is there


@contextmanager
def in_processes(
    lanes: Sequence[Lane], reader: Reader, count: int | None = None
) -> Iterator[list[Bring]]:
    """Fork processes and give what has each of them bring a window.

    They end with this, and with the process that makes them, however that ends. No other thread may
    be running: what it holds would stay locked in the forks.

    Args:
        lanes: As `Inflow` gets them.
        reader: With `THREADS` threads; what it has read is there in all processes.
        count: How many; by default what keeps this host's cores busy, and no more than windows.
    """
    for lane in lanes:
        lane.locate(reader)
    if count is None:
        cores = len(os.sched_getaffinity(0))
        count = min(sum(lane.windows for lane in lanes), _MOST, max(2, cores // THREADS))
    made = [_Filler(lanes, reader) for _ in range(count)]
    try:
        yield [filler.bring for filler in made]
    finally:
        for filler in made:
            filler.end()


class _Filler:
    """One of the processes."""

    def __init__(self, lanes: Sequence[Lane], reader: Reader) -> None:
        self._channel, theirs = _FORK.Pipe()
        self._process = _FORK.Process(
            target=_serve, args=(theirs, lanes, reader, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()

    def bring(self, lane: int, number: int) -> None:
        """Have it bring a window, and raise what has gone wrong there; one call at a time."""
        try:
            self._channel.send_bytes(msgpack.packb((lane, number)))
            error = msgpack.unpackb(self._channel.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            raise TorchmigError(
                f"a process that brings GPU memory into staging has ended with {code}"
            ) from None
        if error is not None:
            raise from_message(error)

    def end(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.join()
        self._channel.close()


def _serve(channel: "Connection[Any, Any]", lanes: Sequence[Lane], reader: Reader, of: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != of:  # it has ended before that
        return
    with suppress(EOFError):  # it has ended by now
        while True:
            lane, number = msgpack.unpackb(channel.recv_bytes())
            answer = None
            try:
                lanes[lane].bring(reader, number)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                answer = to_message(error)
            channel.send_bytes(msgpack.packb(answer))
