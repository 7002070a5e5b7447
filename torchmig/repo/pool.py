"""Threads with bounded work in hand, which pass the first failure on to whoever waits.

Both directions of the repository are the same shape: a producer cuts work into tasks, threads do
them, and memory stays bounded because a producer that is ahead has to wait.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

Task = Callable[[], None]


def default_threads() -> int:
    """Return how many threads keep this host busy with hashing and compressing."""
    return max(2, min(16, len(os.sched_getaffinity(0))))


class Pool:
    """A fixed number of threads; `submit` blocks while `max_weight` of work is in hand.

    After a task has failed the others are dropped, and every call raises that failure.
    """

    def __init__(self, name: str, threads: int, max_weight: int) -> None:
        self._max_weight = max_weight
        lock = threading.Lock()
        self._ready = threading.Condition(lock)  # for the threads: there is a task
        self._progress = threading.Condition(lock)  # for the callers: a task is done
        self._waiting = 0  # callers that wait for progress
        self._tasks: deque[tuple[Task, int]] = deque()
        self._weight = 0
        self._unfinished = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"torchmig-{name}-{number}", daemon=True)
            for number in range(threads)
        ]

    def __enter__(self) -> "Pool":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._ready:
            self._closed = True
            if error is not None:
                self._tasks.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def submit(self, task: Task, weight: int = 0) -> None:
        """Hand over a task; waits while too much is in hand, but always lets one through."""
        with self._ready:
            self._wait(lambda: not self._weight or self._weight + weight <= self._max_weight)
            self._weight += weight
            self._unfinished += 1
            self._tasks.append((task, weight))
            self._ready.notify()

    def wait_idle(self) -> None:
        """Wait until every task so far is done."""
        with self._ready:
            self._wait(lambda: not self._unfinished)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, which is asked again after each task."""
        with self._ready:
            self._wait(done)

    def fail(self, error: BaseException) -> None:
        """Make every later call raise `error`, as if a task had failed."""
        with self._ready:
            self._failure = self._failure or error
            self._tasks.clear()
            self._progress.notify_all()

    def _wait(self, done: Callable[[], bool]) -> None:
        while self._failure is None and not done():
            self._waiting += 1
            self._progress.wait()
            self._waiting -= 1
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._tasks and not self._closed:
                    self._ready.wait()
                if not self._tasks:
                    return
                task, weight = self._tasks.popleft()
            failure: BaseException | None = None
            try:
                if self._failure is None:
                    task()
            except BaseException as error:  # noqa: BLE001  (raised again in the producer)
                failure = error
            del task  # its buffers must not live until the next one comes
            with self._ready:
                self._weight -= weight
                self._unfinished -= 1
                if failure is not None and self._failure is None:
                    self._failure = failure
                    self._tasks.clear()
                if self._waiting:
                    self._progress.notify_all()
