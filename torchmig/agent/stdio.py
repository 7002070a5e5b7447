"""Passes on what ranks write into their files of standard output and error.

Ranks write into files and not into the agent's streams because a file is what a dump can carry to
another host. Each line comes out once, also across suspend and restore: a restored rank's files
are tailed from where they ended in the snapshot.
"""

import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

INTERVAL_SECONDS = 0.05
CHUNK_BYTES = 1 << 20


@dataclass
class _Tail:
    path: Path
    out: BinaryIO
    prefix: bytes
    offset: int
    partial: bytes = b""
    file: BinaryIO | None = field(default=None, repr=False)

    def read(self) -> bool:
        """Pass on what is new; True if there was anything."""
        if self.file is None:
            try:
                self.file = self.path.open("rb")
            except OSError:
                return False
        chunk = os.pread(self.file.fileno(), CHUNK_BYTES, self.offset)
        if not chunk:
            # Whoever writes part of a line and waits (a prompt, a progress bar) wants it seen.
            self.flush()
            return False
        self.offset += len(chunk)
        *lines, self.partial = (self.partial + chunk).split(b"\n")
        for line in lines:
            self.out.write(self.prefix + line + b"\n")
        self.out.flush()
        return True

    def flush(self) -> None:
        if self.partial and not self.prefix:
            self.out.write(self.partial)
            self.out.flush()
            self.partial = b""


class StdioTail:
    """Tails the files of a node's ranks on one thread; has the interface of torch's TailLog."""

    def __init__(self) -> None:
        self._tails: list[_Tail] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, path: str | Path, *, error: bool, prefix: str = "", offset: int = 0) -> None:
        """Tail a file from `offset` bytes on, to standard output or standard error."""
        out = (sys.stderr if error else sys.stdout).buffer
        self._tails.append(_Tail(Path(path), out, prefix.encode(), offset))

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
                if tail.partial and tail.prefix:
                    tail.out.write(tail.prefix + tail.partial + b"\n")
                    tail.out.flush()
                if tail.file is not None:
                    tail.file.close()
                    tail.file = None

    def stopped(self) -> bool:
        """Whether `stop` has been called."""
        return self._stop.is_set()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self.drain()
