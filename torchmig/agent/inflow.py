"""GPU memory on its way from a repository to a rank, window by window through staging.

A rank takes its bytes when CRIU and the driver have brought it back. Until then they are read
ahead, as far as staging has room; from then on the rank empties windows about as fast as memory is
written, and what was emptied is filled again. So less staging than GPU memory does, and what is
used twice has to be found once: fresh memory can cost more time than reading.

The half that fills and the half that takes may be in one process or in two: see loader.py.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeAlias

from torchmig.capture.device.blocks import StoredBlocks
from torchmig.capture.device.windows import Piece, Ring
from torchmig.repo import MappedFile, Reader

Bring: TypeAlias = Callable[[int, int], object]
"""Brings a window: told which lane's it is, as `Inflow` numbers them, and which one of that."""


class Lane:
    """Fills one rank's windows. Its `changed` is held where a method says so."""

    def __init__(
        self, stored: StoredBlocks, ring: Ring, staging_fd: int, on_filled: Callable[[], object]
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            stored: What the rank gets.
            ring: How it lies in staging.
            staging_fd: Of staging as long as the ring, of which nobody else makes use meanwhile.
            on_filled: Called when the next window is there.
        """
        self.changed = threading.Condition()  # `Inflow` has one for all lanes
        self.begun = 0  # windows that have been filled or are being filled
        self._stored = stored
        self._ring = ring
        size = ring.size_bytes
        self._staging = MappedFile(staging_fd, size) if size else None
        self._on_filled = on_filled
        self._telling = threading.Lock()
        self._filled: set[int] = set()  # those that have not been told
        self._told = 0
        self._emptied = 0
        self._being_filled = 0
        self._is_closed = False

    @property
    def windows(self) -> int:
        """How many there are."""
        return len(self._ring.windows)

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be filled any more."""
        return self._is_closed or self.begun == self.windows

    @property
    def has_room(self) -> bool:
        """Whether the next window can be filled now."""
        return not self.is_over and self.begun - self._emptied < self._ring.slots

    def begin(self) -> int:
        """Return the number of the next window, which has room and the caller is to fill.

        `changed` is held.
        """
        self.begun += 1
        self._being_filled += 1
        return self.begun - 1

    def locate(self, reader: Reader) -> None:
        """Find where all bytes lie, once for all processes that are forked after it."""
        self._stored.locate(reader)

    def bring(self, reader: Reader, number: int) -> None:
        """Bring the bytes of a window, in this process or in a fork of it; no more than that."""
        assert self._staging is not None  # `close` waits for those that were begun
        self._stored.bring(reader, self._ring.pieces(number), self._staging)

    def fill(self, number: int, bring: Callable[[], object]) -> None:
        """Have the bytes of a window brought that was begun, and tell."""
        try:
            bring()
        finally:
            with self.changed:
                self._being_filled -= 1
                self.changed.notify_all()
        with self._telling:
            self._filled.add(number)
            while self._told in self._filled:
                self._filled.remove(self._told)
                self._told += 1
                self._on_filled()

    def empty(self) -> None:
        """Take note that the rank has taken one window more."""
        with self.changed:
            self._emptied += 1
            self.changed.notify_all()

    def close(self) -> None:
        """Have nothing written to staging any more; may be called twice."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._being_filled)
            self._staging = None  # unmaps it


class Arrivals:
    """Gives a rank its windows as they come."""

    def __init__(
        self, ring: Ring, on_emptied: Callable[[], None], on_close: Callable[[], None]
    ) -> None:
        """Prepare.

        Args:
            ring: How what comes lies in staging.
            on_emptied: Called when a window has been taken, so that its place may be filled anew.
            on_close: Called when no more is wanted; nothing is written to staging after it.
        """
        self.close = on_close
        self._ring = ring
        self._on_emptied = on_emptied
        self._changed = threading.Condition()
        self._filled = 0
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._ring.windows)

    def filled(self) -> int:
        """Take note that the next window is there; return how many bytes that are."""
        with self._changed:
            window = self._ring.windows[self._filled]
            self._filled += 1
            self._changed.notify_all()
        return sum(piece.size_bytes for piece in window)

    def fail(self, error: BaseException) -> None:
        """Let whoever waits for a window have an error instead."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def __iter__(self) -> Iterator[list[Piece]]:
        """Yield the pieces of all windows that are there, at their places in staging, in order.

        Together, as a rank pins buffers anew for whatever it is told to take. The places are filled
        anew when the next ones are asked for.

        Raises:
            TorchmigError: What has stopped the reading.
        """
        taken = 0
        while taken < len(self):
            end = min(self._wait_for(taken), taken + self._ring.slots - taken % self._ring.slots)
            yield [piece for number in range(taken, end) for piece in self._ring.pieces(number)]
            for _ in range(taken, end):
                self._on_emptied()
            taken = end

    def _wait_for(self, number: int) -> int:
        """Return how many windows there are once this one is."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled > number or self._error is not None)
            if self._filled <= number and self._error is not None:
                raise self._error
            return self._filled


class Inflow(threading.Thread):
    """Fills lanes, whichever has room and is behind, until each has got all or is closed.

    Several windows at a time: the disk would rest at the end of each, where the last bytes are
    decoded.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        bringing: Callable[[], AbstractContextManager[Sequence[Bring]]],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Prepare.

        Args:
            lanes: What is to be filled.
            bringing: Gives what brings windows, each to be called by one thread.
            on_error: Told what has gone wrong; nothing is brought after it.
        """
        super().__init__(name="inflow", daemon=True)
        self._lanes = list(lanes)
        self._bringing = bringing
        self._on_error = on_error
        self._changed = threading.Condition()
        self._has_failed = False
        for lane in lanes:
            lane.changed = self._changed

    def run(self) -> None:
        """Read until the end, or hand what has gone wrong to those who wait."""
        try:
            with self._bringing() as brings:
                others = [
                    threading.Thread(target=self._fill, args=(bring,), daemon=True)
                    for bring in brings[1:]
                ]
                for thread in others:
                    thread.start()
                self._fill(brings[0])
                for thread in others:
                    thread.join()
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self._fail(error)

    def _fill(self, bring: Bring) -> None:
        try:
            while (next_one := self._next()) is not None:
                lane, number = next_one
                self._lanes[lane].fill(number, partial(bring, lane, number))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._has_failed
                    or any(lane.has_room for lane in self._lanes)
                    or all(lane.is_over for lane in self._lanes)
                )
            )
            ready = [number for number, lane in enumerate(self._lanes) if lane.has_room]
            if self._has_failed or not ready:
                return None
            behind = min(ready, key=lambda number: self._lanes[number].begun)
            return behind, self._lanes[behind].begin()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()
        self._on_error(error)


@contextmanager
def in_this_process(
    lanes: Sequence[Lane], reading: Callable[[], AbstractContextManager[Reader]]
) -> Iterator[list[Bring]]:
    """Give what brings two windows at a time by the threads of one reader."""
    with reading() as reader:

        def bring(lane: int, number: int) -> None:
            lanes[lane].bring(reader, number)

        yield [bring, bring]
