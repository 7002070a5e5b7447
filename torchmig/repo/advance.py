"""How a caller hears of bytes as they are done."""

import threading
from collections.abc import Callable

Advance = Callable[[int], None]
"""Told of a number of bytes, from any thread."""

_STEP_BYTES = 16 << 20


def unheard(size_bytes: int) -> None:
    """Tell nobody."""


class InSteps:
    """Passes numbers of bytes on when they have become many: to tell may cost a system call."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance  # called by one thread at a time
        self._lock = threading.Lock()
        self._untold_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Take note of bytes that are done; an `Advance`."""
        with self._lock:
            self._untold_bytes += size_bytes
            if self._untold_bytes >= _STEP_BYTES:
                self._tell()

    def close(self) -> None:
        """Pass on what is left."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self._advance(self._untold_bytes)
        self._untold_bytes = 0
