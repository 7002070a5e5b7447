"""Memory that is used again.

Touching fresh memory costs the kernel three times what copying into warm memory does, so that the
pipelines pass the same few buffers round instead of making new ones.
"""

import threading


class Memory:
    """Bytes that one thread uses again and again, as many as it has needed at once."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, size_bytes: int) -> memoryview:
        """Return that many of them, with whatever they hold."""
        if len(self._bytes) < size_bytes:
            self._bytes = bytearray(size_bytes)
        return memoryview(self._bytes)[:size_bytes]


class BufferPool:
    """Buffers of one size; how many exist is bounded by whoever takes them."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """Return a buffer with arbitrary content."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return bytearray(self.size_bytes)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back; nobody may use it any more. One of another size is dropped."""
        if len(buffer) == self.size_bytes:
            with self._lock:
                self._free.append(buffer)
