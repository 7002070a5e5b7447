"""A wrapper that tries again what may work later, until a deadline.

It is one wrapper for all stores, so that each of them only has to tell passing errors from lasting
ones.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchmig.errors import StoreError, TransientStoreError
from torchmig.store.base import Buffer, Entry, Store

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often to try; waits double from the first to the longest, with jitter."""

    deadline_seconds: float = 300.0
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 15.0


class RetryingStore(Store):
    """Another store whose passing failures are tried again."""

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy | None = None,
        *,
        wait: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.read_bytes = inner.read_bytes
        self.made_on_demand = inner.made_on_demand
        self._policy = policy or RetryPolicy()
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._clock = clock

    def exists(self) -> bool:
        return self._try(self.inner.exists)

    def create(self) -> None:
        self._try(self.inner.create)

    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool = True) -> None:
        self._try(lambda: self.inner.put(name, parts, durable=durable))

    def get(self, name: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        return self._try(lambda: self.inner.get(name, offset_bytes, size_bytes))

    def get_into(self, name: str, offset_bytes: int, buffer: memoryview) -> memoryview:
        return self._try(lambda: self.inner.get_into(name, offset_bytes, buffer))

    def expect(self, name: str, offset_bytes: int, size_bytes: int) -> None:
        self.inner.expect(name, offset_bytes, size_bytes)

    def list(self, prefix: str) -> Iterator[Entry]:
        # Taken as a whole: a listing that broke in the middle begins anew.
        return iter(self._try(lambda: list(self.inner.list(prefix))))

    def delete(self, name: str) -> None:
        self._try(lambda: self.inner.delete(name))

    def sweep(self, older_than_seconds: float) -> int:
        return self._try(lambda: self.inner.sweep(older_than_seconds))

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    def _try(self, action: Callable[[], _Result]) -> _Result:
        policy = self._policy
        begun = self._clock()
        tries = 0
        while True:
            tries += 1
            try:
                return action()
            except TransientStoreError as error:
                longest = min(
                    policy.first_wait_seconds * 2 ** min(tries - 1, 30),
                    policy.longest_wait_seconds,
                )
                wait_seconds = longest * random.uniform(0.5, 1.0)  # noqa: S311  (no secret)
                spent = self._clock() - begun
                if spent + wait_seconds > policy.deadline_seconds or self._closed.is_set():
                    raise StoreError(
                        f"{error}; gave up after {tries} tries in {spent:.0f} s"
                    ) from error
                if tries == 1:
                    _log.warning("%s; trying again", error)
                self._wait(wait_seconds)
