"""Passes on what ranks write into their files of standard output and error.

Ranks write into files and not into the agent's streams because a file is what a dump can carry to
another host. Each line comes out once, also across suspend and restore: a restored rank's files
are tailed from where they ended in the snapshot.
"""

import ctypes
import logging
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.05
CHUNK_BYTES = 1 << 20
PUNCH_HOLE_KEEP_SIZE = 3
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Tail:
    path: Path
    out: BinaryIO
    prefix: bytes
    offset: int
    forget: bool  # free the space of what has been passed on
    partial: bytes = b""
    waits: bool = False  # the partial line was there already when the files were read before
    file: BinaryIO | None = field(default=None, repr=False)
    freed: int = 0

    def read(self) -> bool:
        """Pass on what is new; True if there was anything."""
        if self.file is None:
            try:
                self.file = self.path.open("r+b" if self.forget else "rb")
            except OSError:
                return False
        chunk = os.pread(self.file.fileno(), CHUNK_BYTES, self.offset)
        if not chunk:
            # Whoever writes part of a line and waits (a prompt, a progress bar) wants it seen. The
            # end of a line may be on its way, though, and should not end up behind other ranks'.
            if self.waits and not self.prefix:
                self.write(self.partial)
                self.partial = b""
            self.waits = bool(self.partial)
            return False
        self.offset += len(chunk)
        whole, end, rest = chunk.rpartition(b"\n")
        if end:
            lines = self.partial + whole + end
            if self.prefix:
                lines = b"".join(self.prefix + line + b"\n" for line in lines[:-1].split(b"\n"))
            self.write(lines)
            self.partial = b""
        self.partial += rest
        self.waits = False
        if self.forget and self.offset - self.freed >= CHUNK_BYTES:
            self.free()
        return True

    def write(self, data: bytes) -> None:
        try:
            self.out.write(data)
            self.out.flush()
        except OSError as error:
            # As under `torchmig-run … | head`. A job that trains is worth more than its output.
            name = "output" if self.out is sys.stdout.buffer else "error"
            _silence(self.out)
            log.error("cannot write to standard %s any more: %s; the job goes on", name, error)

    def free(self) -> None:
        """Give back the space of what has been passed on; the file keeps its length."""
        assert self.file is not None
        size = ctypes.c_longlong(self.offset)
        fd = self.file.fileno()
        # Where the file system cannot do this, the file stays as it is.
        _libc.fallocate(fd, PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(0), size)
        self.freed = self.offset

    def end(self) -> None:
        if self.partial:
            self.write(self.prefix + self.partial + (b"\n" if self.prefix else b""))
            self.partial = b""
        if self.file is not None:
            self.file.close()
            self.file = None


class StdioTail:
    """Tails the files of a node's ranks on one thread; has the interface of torch's TailLog."""

    def __init__(self) -> None:
        self._tails: list[_Tail] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(
        self,
        path: str | Path,
        *,
        error: bool,
        prefix: str = "",
        offset: int = 0,
        forget: bool = False,
    ) -> None:
        """Tail a file from `offset` bytes on, to standard output or standard error.

        With `forget` the file does not keep what has been passed on, only its length.
        """
        out = (sys.stderr if error else sys.stdout).buffer
        self._tails.append(_Tail(Path(path), out, prefix.encode(), offset, forget))

    def start(self) -> "StdioTail":
        """Begin to tail."""
        if self._tails:
            self._thread = threading.Thread(target=self._run, name="stdio", daemon=True)
            self._thread.start()
        return self

    def drain(self) -> None:
        """Pass on everything that is in the files now."""
        with self._lock:
            for tail in self._tails:
                while tail.read():
                    pass

    def stop(self) -> None:
        """Pass on the rest and end; may be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.drain()
        with self._lock:
            for tail in self._tails:
                tail.end()

    def stopped(self) -> bool:
        """Whether `stop` has been called."""
        return self._stop.is_set()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self.drain()


def _silence(stream: BinaryIO) -> None:
    """Let a stream lead nowhere, so that what it holds fails no flush later on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
