"""Locks: what keeps a prune away from uploads, on stores that know no locks.

A lock is an object. Whoever wants one puts its own first and looks at the others then, so that of
two at the same time at least one sees the other. Writers share, prune excludes; readers take none,
since nothing that a snapshot refers to is ever deleted under them without a new place being known
first.

A lock is refreshed by writing it again. Its age is the difference of two times that the store gave,
so that no host's clock matters. After half an hour without a refresh, or at once if its process on
this host is gone, a lock is stale and removed by whoever finds it in the way.
"""

import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType

from torchmig.errors import (
    IntegrityError,
    ObjectMissingError,
    RepositoryLockedError,
    StoreError,
)
from torchmig.repo.blob import hash_of
from torchmig.repo.manifest import now_rfc3339
from torchmig.store import Store

_log = logging.getLogger(__name__)

LOCK_PREFIX = "locks"
STALE_SECONDS = 30 * 60.0
REFRESH_SECONDS = 5 * 60.0
_VERSION = 1


class LockKind(StrEnum):
    """Who may hold a lock beside it."""

    SHARED = "shared"  # other shared ones
    EXCLUSIVE = "exclusive"  # nobody


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock, as far as another process can tell."""

    host: str
    boot: str  # of the kernel, so that a process id means something
    pid_namespace: str
    pid: int
    started: str  # of the process, since ids are used again

    @classmethod
    def this_process(cls) -> "Owner":
        """Return this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), _pid_namespace(), pid, _started(pid))

    def is_gone(self) -> bool:
        """Tell whether the process has certainly ended; False if this host cannot know."""
        here = (socket.gethostname(), _boot(), _pid_namespace())
        if not self.boot or (self.host, self.boot, self.pid_namespace) != here:
            return False
        return _started(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock as found in a store."""

    name: str
    kind: LockKind
    purpose: str
    created: str
    owner: Owner | None  # None if the object cannot be read
    age_seconds: float

    @property
    def is_stale(self) -> bool:
        """Tell whether nobody can be behind it any more."""
        gone = self.owner is not None and self.owner.is_gone()
        return gone or self.age_seconds > STALE_SECONDS

    def describe(self) -> str:
        """Return a phrase for people."""
        who = f"process {self.owner.pid} on {self.owner.host!r}" if self.owner else "somebody"
        return (
            f"{who} ({self.purpose}, since {self.created}, refreshed {self.age_seconds:.0f} s ago)"
        )


class Lock:
    """A lock of this process; refreshes itself inside a `with` block only (no thread outside)."""

    def __init__(self, store: Store, kind: LockKind, purpose: str) -> None:
        self.kind = kind
        self.name = f"{LOCK_PREFIX}/{secrets.token_hex(16)}"
        self.refreshed_seconds = time.monotonic()
        self._store = store
        self._data = _encode(kind, purpose, Owner.this_process())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    @classmethod
    def acquire(
        cls, store: Store, kind: LockKind, purpose: str, *, wait_seconds: float = 60.0
    ) -> "Lock":
        """Take a lock; wait for others to let go, then raise `RepositoryLockedError`."""
        lock = cls(store, kind, purpose)
        end = time.monotonic() + wait_seconds
        pause = threading.Event()
        said = False
        while True:
            store.put(lock.name, [lock._data], durable=False)
            try:
                rivals = lock._rivals()
            except BaseException:
                lock.release()
                raise
            if not rivals:
                lock.refreshed_seconds = time.monotonic()
                return lock
            lock.release()
            if time.monotonic() >= end:
                raise RepositoryLockedError(
                    f"cannot {purpose} in {store.url!r}: it is locked by {rivals[0].describe()}; "
                    "wait for it, or run 'torchmig unlock' if it is gone"
                )
            if not said:
                _log.warning("waiting for %s to let go of %r", rivals[0].describe(), store.url)
                said = True
            # Two that back off from one another must not come back at the same moment.
            pause.wait(random.uniform(0.1, 1.0))  # noqa: S311

    def __enter__(self) -> "Lock":
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_fresh, name="torchmig-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def refresh(self, *, older_than_seconds: float = 0.0) -> bool:
        """Write the lock again; False, for good, if somebody has removed it.

        One that was written less than `older_than_seconds` ago is only looked for.
        """
        if not self._lost:
            try:
                self._store.get(self.name)
                if time.monotonic() - self.refreshed_seconds >= older_than_seconds:
                    self._store.put(self.name, [self._data], durable=False)
                    self.refreshed_seconds = time.monotonic()
            except ObjectMissingError:
                self._lost = True
        return not self._lost

    def release(self) -> None:
        """Give the lock up; a store that fails now only leaves a stale one behind."""
        try:
            self._store.delete(self.name)
        except StoreError as error:
            _log.warning("lock %r stays until it is stale: %s", self.name, error)

    def _keep_fresh(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            try:
                if not self.refresh():
                    return
            except StoreError as error:
                _log.warning("cannot refresh lock %r: %s", self.name, error)

    def _rivals(self) -> list[LockInfo]:
        rivals = []
        for info in read_locks(self._store, now_name=self.name):
            if info.name == self.name or LockKind.EXCLUSIVE not in (self.kind, info.kind):
                continue
            if info.is_stale:
                _log.warning("removing the stale lock of %s", info.describe())
                self._store.delete(info.name)
                continue
            rivals.append(info)
        return rivals


def read_locks(store: Store, now_name: str | None = None) -> list[LockInfo]:
    """Return the locks of a store, with ages by the store's clock.

    Args:
        store: where.
        now_name: a lock that was written just now; without one a probe is written.
    """
    probe = None
    if now_name is None:
        probe = now_name = f"{LOCK_PREFIX}/{secrets.token_hex(16)}"
        store.put(probe, [b""], durable=False)
    try:
        entries = list(store.list(LOCK_PREFIX))
        now = next((entry.modified_seconds for entry in entries if entry.name == now_name), 0.0)
        infos = []
        for entry in entries:
            if entry.name == probe:
                continue
            try:
                data = store.get(entry.name)
            except ObjectMissingError:
                continue  # given up meanwhile
            if not data:
                continue  # the probe of somebody else who looks at the locks
            infos.append(_decode(entry.name, data, max(0.0, now - entry.modified_seconds)))
        return infos
    finally:
        if probe is not None:
            store.delete(probe)


def check_lock(name: str, data: bytes) -> None:
    """Raise `IntegrityError` if a lock object is damaged."""
    if data and _decode(name, data, 0.0).owner is None:
        raise IntegrityError(f"{name!r} is damaged: its bytes do not match its hash")


def _encode(kind: LockKind, purpose: str, owner: Owner) -> bytes:
    document = {
        "created": now_rfc3339(),
        "kind": str(kind),
        "owner": asdict(owner),
        "purpose": purpose,
        "version": _VERSION,
    }
    body = json.dumps(document, sort_keys=True).encode()
    return hash_of(body).hex().encode() + b"\n" + body + b"\n"


def _decode(name: str, data: bytes, age_seconds: float) -> LockInfo:
    """Return what a lock says; one that cannot be read counts as exclusive."""
    unknown = LockInfo(name, LockKind.EXCLUSIVE, "unknown", "unknown", None, age_seconds)
    digest, _, body = data.partition(b"\n")
    if hash_of(body[:-1]).hex().encode() != digest or body[-1:] != b"\n":
        return unknown
    try:
        document = json.loads(body)
        return LockInfo(
            name=name,
            kind=LockKind(document["kind"]),
            purpose=str(document["purpose"]),
            created=str(document["created"]),
            owner=Owner(**document["owner"]),
            age_seconds=age_seconds,
        )
    except (ValueError, KeyError, TypeError):
        return unknown


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty if there is none."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return ""
    return fields[19]
