"""The rule that a rank follows: when it stands still and when it goes on.

The C++ gate does the same; this is the text that both are held to, and what simulated ranks run.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchmig.cut.keys import Key
from torchmig.cut.messages import Level, Order, Place

_LEVEL_OF_PLACE = {Place.BOUNDARY: Level.STEP, Place.PYTHON: Level.ANY}


def holds(order: Order, counters: Mapping[Key, int], key: Key) -> bool:
    """Say whether an operation on `key`, not yet in `counters`, is held before it is issued."""
    return order.level >= Level.GATE and counters.get(key, 0) + 1 > order.targets.get(key, 0)


def parks(order: Order, counters: Mapping[Key, int], place: Place) -> bool:
    """Say whether a thread at a step boundary or a Python safe point stands still there."""
    return order.level >= _LEVEL_OF_PLACE[place] and meets(order, counters)


def meets(order: Order, counters: Mapping[Key, int]) -> bool:
    """Say whether every target of `order` is reached."""
    return all(counters.get(key, 0) >= target for key, target in order.targets.items())
