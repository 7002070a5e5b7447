"""A store in a folder: temporary file, fsync, rename, fsync of the folder.

The order is what makes a crash harmless: a name shows up only when all of its bytes are on disk.
Files are 0600 and folders 0700, because the objects hold the memory of somebody's job.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchmig.errors import ObjectMissingError, StoreError, TransientStoreError, UsageError
from torchmig.store.base import Buffer, Entry, Store, check_name

_TEMPORARY = "tmp"
_IOV_MAX = 1024
_PASSING = {errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE}
_CURES = {
    errno.ENOSPC: "free space there or use another repository",
    errno.EDQUOT: "free space there or use another repository",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}


class FolderStore(Store):
    """Objects as files below one folder."""

    read_bytes = 4 << 20

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def exists(self) -> bool:
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"cannot use {self.url!r} as a repository: it is a file, not a folder")
        return self.root.is_dir()

    def create(self) -> None:
        if self.exists():
            return
        with _translated("make", self.url):
            self._make_folder(self.root)

    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool = True) -> None:
        target = self.root / check_name(name)
        temporary = self.root / _TEMPORARY / f"{secrets.token_hex(16)}"
        with _translated("write", name, self.url):
            fd = self._open_temporary(temporary)
            try:
                try:
                    _write_all(fd, parts)
                    if durable:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                self._rename(temporary, target)
                if durable:
                    _sync_folder(target.parent)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise

    def get(self, name: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        with _translated("read", name, self.url):
            fd = os.open(self.root / check_name(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size - offset_bytes
                return _read_all(fd, offset_bytes, size if size_bytes is None else size_bytes)
            finally:
                os.close(fd)

    def get_into(self, name: str, offset_bytes: int, buffer: memoryview) -> memoryview:
        with _translated("read", name, self.url):
            fd = os.open(self.root / check_name(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                got = 0
                while got < len(buffer):
                    count = os.preadv(fd, [buffer[got:]], offset_bytes + got)
                    if not count:
                        break
                    got += count
                return buffer[:got]
            finally:
                os.close(fd)

    def expect(self, name: str, offset_bytes: int, size_bytes: int) -> None:
        """Have the kernel fetch a range: one after the other, for threads that read side by side.

        Their own reads reach a disk in no order and stop while a thread unpacks.
        """
        with suppress(OSError):  # whoever reads it will say so
            fd = os.open(self.root / check_name(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, offset_bytes, size_bytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def list(self, prefix: str) -> Iterator[Entry]:
        start = self.root / check_name(prefix) if prefix else self.root
        with _translated("list", prefix, self.url):
            yield from self._walk(start)

    def delete(self, name: str) -> None:
        with _translated("delete", name, self.url), suppress(FileNotFoundError):
            (self.root / check_name(name)).unlink()

    def sweep(self, older_than_seconds: float) -> int:
        freed_bytes = 0
        folder = self.root / _TEMPORARY
        with _translated("clean", _TEMPORARY, self.url):
            if not folder.is_dir():
                return 0
            now = self._now(folder)
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if now - status.st_mtime >= older_than_seconds:
                        path.unlink()
                        freed_bytes += status.st_size
        return freed_bytes

    def _now(self, folder: Path) -> float:
        """Return the time as the file system sees it (a file server's clock may differ)."""
        probe = folder / f"{secrets.token_hex(16)}"
        try:
            os.close(self._open_temporary(probe))
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with suppress(OSError):
                probe.unlink()

    def _walk(self, folder: Path) -> Iterator[Entry]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if Path(entry.path) != self.root / _TEMPORARY:
                    yield from self._walk(Path(entry.path))
                continue
            with suppress(FileNotFoundError):  # deleted by somebody else meanwhile
                status = entry.stat(follow_symlinks=False)
                name = Path(entry.path).relative_to(self.root).as_posix()
                yield Entry(name, status.st_size, status.st_mtime)

    def _open_temporary(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._make_folder(path.parent)
            return os.open(path, flags, 0o600)

    def _rename(self, temporary: Path, target: Path) -> None:
        try:
            temporary.rename(target)
        except FileNotFoundError:
            self._make_folder(target.parent)
            temporary.rename(target)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, each one durable in the one above it."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)


def _write_all(fd: int, parts: Sequence[Buffer]) -> None:
    pending = [memoryview(part).cast("B") for part in parts if len(part)]
    pending.reverse()
    while pending:
        batch = pending[: -_IOV_MAX - 1 : -1]
        written = os.writev(fd, batch)
        while written:
            head = pending.pop()
            if written < len(head):
                pending.append(head[written:])
                break
            written -= len(head)


def _read_all(fd: int, offset_bytes: int, size_bytes: int) -> bytes:
    if size_bytes <= 0:
        return b""
    data = os.pread(fd, size_bytes, offset_bytes)
    if len(data) == size_bytes or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size_bytes and (data := os.pread(fd, size_bytes - got, offset_bytes + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _translated(verb: str, what: str, where: str = "") -> Iterator[None]:
    """Turn `OSError` into the errors of the store contract."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissingError(f"cannot {verb} {what!r} in {where!r}: not there") from error
    except OSError as error:
        place = f" in {where!r}" if where else ""
        cure = _CURES.get(error.errno or 0)
        reason = (error.strerror or str(error)).lower() + (f"; {cure}" if cure else "")
        kind = TransientStoreError if error.errno in _PASSING else StoreError
        raise kind(f"cannot {verb} {what!r}{place}: {reason}") from error
