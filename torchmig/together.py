"""Does one thing with several items side by side, each on a thread of its own.

All have ended when the caller goes on, also after a failure: a way back must not run beside what it
undoes.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def together(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return what `work` makes of each item, in order; else raise the first error in that order."""
    return [future.result() for future in attempts(work, items)]


def attempts(work: Callable[[Item], Result], items: Iterable[Item]) -> list["Future[Result]"]:
    """Return how `work` has ended with each item, in order; raises nothing of its own."""
    everything = list(items)
    with ThreadPoolExecutor(max_workers=max(1, len(everything))) as pool:
        return [pool.submit(work, item) for item in everything]
