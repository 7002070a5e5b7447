"""Stores that die at a chosen write, to try every point at which a process can be killed."""

import os
import signal
import threading
import warnings
from pathlib import Path

from torchmig.store import FolderStore, Store


class CountingStore(Store):
    """Passes everything on and counts what changes the store."""

    def __init__(self, inner):
        self.inner = inner
        self.url = inner.url
        self.read_bytes = inner.read_bytes
        self.writes = []
        self.reads = []
        self.expected = []
        self._lock = threading.Lock()

    def exists(self):
        return self.inner.exists()

    def create(self):
        self.inner.create()

    def put(self, name, parts, *, durable=True):
        with self._lock:  # one write at a time, so that a number means the same every run
            self.before("put", name)
            self.inner.put(name, parts, durable=durable)
            self.writes.append(("put", name))
            self.after("put", name)

    def get(self, name, offset_bytes=0, size_bytes=None):
        data = self.inner.get(name, offset_bytes, size_bytes)
        self.reads.append((name, len(data)))
        return data

    def expect(self, name, offset_bytes, size_bytes):
        self.expected.append((name, size_bytes))
        self.inner.expect(name, offset_bytes, size_bytes)

    def list(self, prefix):
        return self.inner.list(prefix)

    def delete(self, name):
        with self._lock:
            self.before("delete", name)
            self.inner.delete(name)
            self.writes.append(("delete", name))
            self.after("delete", name)

    def sweep(self, older_than_seconds):
        return self.inner.sweep(older_than_seconds)

    def close(self):
        self.inner.close()

    def before(self, action, name): ...

    def after(self, action, name): ...


class KillingStore(CountingStore):
    """Kills its process with SIGKILL right after the given number of writes."""

    def __init__(self, inner, writes):
        super().__init__(inner)
        self._left = writes

    def before(self, action, name):
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


class HalfWritingFolder(FolderStore):
    """A folder whose process is killed between the temporary file and its rename."""

    def __init__(self, root: Path, writes):
        super().__init__(root)
        self._left = writes

    def _rename(self, temporary, target):
        if self._left == 0:
            os.truncate(temporary, temporary.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        super()._rename(temporary, target)


def run_in_child(action) -> bool:
    """Run `action` in a forked child; return True if it came to its end, False if it was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads wait in pytest-xdist
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001  (a child must never come back into pytest)
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the child failed; see its traceback above"
    return True
