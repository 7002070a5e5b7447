"""GPU memory on its way from a repository to restored ranks, window by window through staging.

A rank takes its bytes when CRIU and the driver have brought it back. Until then they are read
ahead, as far as its staging has room; from then on the rank empties windows about as fast as memory
is written, and what was emptied is filled again. So a host needs memory for a few windows only, and
finds it once: fresh memory costs more time than reading.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torchmig.capture.device.blocks import StoredBlocks
from torchmig.capture.device.staging import HUGE_PAGE_BYTES, Staging
from torchmig.capture.device.windows import PIECE_BYTES, Piece, windows
from torchmig.repo import Reader

SLOTS = 8


class Lane:
    """One rank's windows. `Inflow` fills them, `arrivals` gives them to the rank."""

    def __init__(self, stored: StoredBlocks, staging: Staging, size_bytes: int) -> None:
        """Lay the windows out; nothing is read yet.

        Args:
            stored: What the rank gets.
            staging: Its staging, of which no one else makes use meanwhile.
            size_bytes: How much of that may be used, or a little more where it is tiny.
        """
        window = max(2 * PIECE_BYTES, -(-size_bytes // SLOTS))
        window = -(-window // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._slots = max(1, size_bytes // window)
        self._window_bytes = window
        self._stored = stored
        self._staging = staging
        self._windows = list(windows(stored.blocks, window))
        self._changed = threading.Condition()
        self._filled = 0
        self._emptied = 0
        self._is_filling = False
        self._is_closed = False
        self._error: BaseException | None = None
        staging.grow(self._slots * window)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._windows)

    def fill(self, reader: Reader, number: int) -> None:
        """Bring a window's bytes, as soon as there is room for it; windows come in order."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or number - self._emptied < self._slots)
            if self._is_closed:
                return
            self._is_filling = True
        try:
            self._stored.bring(reader, self._placed(number), self._staging.fd)
        finally:
            with self._changed:
                self._is_filling = False
                self._changed.notify_all()
        with self._changed:
            self._filled = number + 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let whoever waits for a window have an error instead."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def arrivals(self) -> Iterator[list[Piece]]:
        """Yield each window's pieces, at their places in staging, as they come.

        A window's place is filled anew when the next one is asked for.

        Raises:
            TorchmigError: What has stopped the reading.
        """
        for number in range(len(self._windows)):
            self._wait_filled(number)
            yield self._placed(number)

    def close(self) -> None:
        """Have nothing written to staging any more; may be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_filling)

    def _wait_filled(self, number: int) -> None:
        """Give up the windows before this one, and wait for it."""
        with self._changed:
            self._emptied = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._filled > number or self._error is not None)
            if self._filled <= number and self._error is not None:
                raise self._error

    def _placed(self, number: int) -> list[Piece]:
        start = number % self._slots * self._window_bytes
        return [replace(piece, offset=start + piece.offset) for piece in self._windows[number]]


class Inflow(threading.Thread):
    """Reads for the lanes of a node, in turns, until each is full, has got all, or is closed."""

    def __init__(
        self, lanes: Sequence[Lane], reading: Callable[[], AbstractContextManager[Reader]]
    ) -> None:
        super().__init__(name="inflow", daemon=True)
        self._lanes = list(lanes)
        self._reading = reading

    def run(self) -> None:
        """Read until the end, or hand what has gone wrong to those who wait."""
        try:
            with self._reading() as reader:
                for number in range(max(map(len, self._lanes), default=0)):
                    for lane in self._lanes:
                        if number < len(lane):
                            lane.fill(reader, number)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            for lane in self._lanes:
                lane.fail(error)
