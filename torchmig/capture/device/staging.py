"""Staging: host memory through which GPU bytes go, one memfd a rank.

The agent owns it, the rank gets a descriptor of it over a unix socket for as long as it copies.
Fresh memory is found by the kernel at a fraction of the speed of the bus, so it is touched in
advance, in the background, as far as the rank's GPU memory needs it.
"""

import atexit
import contextlib
import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from torchmig.capture.device.windows import ALIGNMENT_BYTES, PIECE_BYTES, Block
from torchmig.errors import HostUnfitError, TorchmigError
from torchmig.host import available_bytes
from torchmig.units import format_size

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
_STEP_BYTES = 64 << 20
SMALLEST_BYTES = 64 << 20  # which GPU memory can go through
DEFAULT_SHARE = 0.4  # of the memory that is available, for all ranks of a node together


class Staging:
    """One rank's staging. Thread-safe; `close` may be called twice."""

    def __init__(self, size_bytes: int, fd: int | None = None) -> None:
        """Make it; nothing is touched yet.

        Args:
            size_bytes: Rounded up to huge pages.
            fd: Staging that another process has made, as long as this and touched; it is closed
                with this.
        """
        self.size_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._touched = 0 if fd is None else self.size_bytes
        self._fd = os.memfd_create("torchmig-staging", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self._fd, self.size_bytes)
        self._lock = threading.Lock()
        self._huge = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        # A thread inside the extension must not meet the end of the interpreter.
        atexit.register(self.close)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether it has been given back."""
        return self._fd < 0

    @property
    def touched_bytes(self) -> int:
        """How far from its start it has been touched, or is being touched."""
        return min(self._touched, self.size_bytes)

    @property
    def huge_bytes(self) -> int:
        """How much of it is in huge pages."""
        return self._huge

    def grow(self, size_bytes: int) -> None:
        """Make it at least so long; what is new is not touched yet."""
        with self._lock:
            if size_bytes > self.size_bytes and self._fd >= 0:
                self.size_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
                os.ftruncate(self._fd, self.size_bytes)

    def touch(self, size_bytes: int, threads: int = 2) -> None:
        """Start to touch the first `size_bytes` in the background; returns at once."""
        wanted = min(size_bytes, self.size_bytes)
        if wanted <= self._touched or self._stop.is_set():
            return
        for number in range(threads):
            thread = threading.Thread(
                target=self._touch_until, args=(wanted,), name=f"touch-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait_touched(self) -> None:
        """Return when everything that was asked for has been touched."""
        for thread in list(self._threads):
            thread.join()
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _touch_until(self, wanted: int) -> None:
        # The extension is linked against torch's libraries, which not everybody has loaded who
        # makes staging.
        import torch  # noqa: F401

        from torchmig import _C

        while not self._stop.is_set():
            with self._lock:
                start = self._touched
                if start >= wanted:
                    return
                size = min(_STEP_BYTES, self.size_bytes - start)
                self._touched += size
            try:
                huge = _C.touch_file(self._fd, start, size)
            except OSError as error:
                # What is left untouched costs time at the checkpoint, and nothing else.
                log.warning("staging is touched only up to %d bytes: %s", start, error)
                return
            with self._lock:
                self._huge += huge

    @contextlib.contextmanager
    def view(self) -> Iterator[memoryview]:
        """Give its bytes, to read and to write."""
        with mmap.mmap(self._fd, self.size_bytes) as mapped, memoryview(mapped) as view:
            yield view

    @contextlib.contextmanager
    def offered(self, path: Path) -> Iterator[str]:
        """Hand the descriptor to whoever connects to a unix socket at `path` meanwhile.

        Only processes of this user are served; the folder of the path keeps the others out.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            path.unlink(missing_ok=True)
            try:
                listener.bind(os.fspath(path))
                path.chmod(0o600)
            except OSError as error:
                raise TorchmigError(
                    f"cannot hand staging to the rank at '{path}': {error.strerror}"
                ) from error
            listener.listen()
            thread = threading.Thread(target=self._offer, args=(listener,), daemon=True)
            thread.start()
            try:
                yield os.fspath(path)
            finally:
                # Wakes the thread out of accept().
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
                path.unlink(missing_ok=True)

    def _offer(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                socket.send_fds(connection, [b"staging"], [self._fd])

    def close(self) -> None:
        """Give the memory back."""
        atexit.unregister(self.close)
        self._stop.set()
        self.wait_touched()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def require_room(
    action: str, blocks: Sequence[Block], touched_bytes: int, limit_bytes: int | None
) -> int:
    """Return how much staging a rank can have now; it may be more than its blocks need.

    Args:
        action: What it is for, in messages.
        blocks: What is to go through it.
        touched_bytes: How much of it is there already.
        limit_bytes: What the user allows, or None.

    Raises:
        HostUnfitError: It is too little to begin with.
    """
    most = touched_bytes + available_bytes()
    if limit_bytes is not None:
        most = min(most, limit_bytes)
    if most < min(room_for(blocks), SMALLEST_BYTES):
        live = format_size(sum(block.size_bytes for block in blocks))
        raise HostUnfitError(
            f"cannot {action} {live} on GPUs: staging can have {format_size(most)} of this host's "
            f"memory; free some, or give '--staging' at least {format_size(SMALLEST_BYTES)} a rank"
        )
    return most


def room_for(blocks: Sequence[Block]) -> int:
    """Return how much staging holds all of some blocks."""
    aligned = (-(-block.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for block in blocks)
    return 2 * PIECE_BYTES + sum(aligned)


def default_size(ranks: int, gpu_bytes: int) -> int:
    """Return the size of one rank's staging where the user names none.

    Args:
        ranks: How many ranks of this node need one.
        gpu_bytes: Memory of one GPU; more is never needed.
    """
    return max(
        HUGE_PAGE_BYTES * 16, min(gpu_bytes, int(available_bytes() * DEFAULT_SHARE) // ranks)
    )
