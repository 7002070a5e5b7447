"""A writing session: the shared lock that lasts from the first writer to the commit.

Between the two, blobs lie in the repository that no snapshot refers to yet, on the word that a
snapshot soon will. The lock keeps prunes away until then. Nothing runs between the `with` blocks of
writers, so that the process may fork: the lock is just not refreshed there, and lasts half an hour.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchmig.errors import StoreError
from torchmig.repo.index import Index
from torchmig.repo.locks import Lock, LockKind
from torchmig.store import Store

_RECENT_SECONDS = 60.0
_TRUSTED_SECONDS = 10 * 60.0  # well below the time after which a lock is stale


class WriteSession:
    """The lock of one `Repository` object, shared by all its writers."""

    def __init__(self, store: Store, index: Index) -> None:
        self.index = index
        self._store = store
        self._mutex = threading.Lock()
        self._lock: Lock | None = None
        self._writers = 0
        self._is_broken = False  # a prune may have run since the session began

    def begin(self) -> None:
        """Hold the lock for one more writer, and know what is stored by now."""
        with self._mutex:
            if self._writers == 0:
                self._take()
            self._writers += 1

    def end(self, *, failed: bool) -> None:
        """Let one writer go; without failure the lock lasts on until the commit."""
        with self._mutex:
            self._writers -= 1
            if self._writers or self._lock is None:
                return
            self._lock.__exit__(None, None, None)
            if failed:
                self._release()
            else:
                self._require()

    def require_lock(self) -> None:
        """Raise if the lock has been lost while writing: a prune may have deleted what was sent."""
        with self._mutex:
            self._require()

    def _require(self) -> None:
        if self._lock is None or not self._lock.refresh(older_than_seconds=_RECENT_SECONDS):
            self._is_broken = True
            raise StoreError(
                f"lost the lock on {self._store.url!r} while writing: this host stood still "
                "for too long, and a prune may have run; write the snapshot again"
            )

    def release(self) -> None:
        """Give the lock up, unless a writer is at work."""
        with self._mutex:
            if not self._writers:
                self._release()

    @contextmanager
    def committing(self) -> Iterator[bool]:
        """Hold the lock while a manifest is put, and end the session with it.

        Yields:
            Whether the session has been unbroken, so that blobs known once are still there.
        """
        with self._mutex:
            is_fresh = (
                self._lock is not None
                and time.monotonic() - self._lock.refreshed_seconds < _TRUSTED_SECONDS
            )
            if self._lock is None or not self._lock.refresh(older_than_seconds=_RECENT_SECONDS):
                is_fresh = False
                self._lock = Lock.acquire(self._store, LockKind.SHARED, "commit a snapshot")
            # Other nodes have written meanwhile; if index objects have gone, so may have blobs.
            has_shrunk = self.index.refresh(self._store)
            try:
                yield is_fresh and not has_shrunk and not self._is_broken
            finally:
                if not self._writers:
                    self._release()

    def _take(self) -> None:
        if self._lock is not None and not self._lock.refresh(older_than_seconds=_RECENT_SECONDS):
            self._lock = None
            self._is_broken = True
        if self._lock is None:
            self._lock = Lock.acquire(self._store, LockKind.SHARED, "write")
        # Only now: with the lock held, what the index names stays.
        try:
            self._is_broken = self.index.refresh(self._store) or self._is_broken
        except BaseException:
            self._release()
            raise
        self._lock.__enter__()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._is_broken = False
