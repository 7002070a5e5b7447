"""Orders to ranks and reports from them, and their plain form for msgpack or JSON.

The plain form holds only dicts, lists, strings, numbers and truth values, so that neither side
needs the other's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from torchmig.cut.keys import Key, parse_key

Wire = dict[str, Any]


class Level(IntEnum):
    """Where an order asks a rank to stand still; each level includes the ones below it."""

    FREE = 0
    STEP = 1  # at the end of optimizer.step
    GATE = 2  # before an operation is issued
    ANY = 3  # at any Python safe point


class State(StrEnum):
    """What a rank is doing as far as a request is concerned."""

    NOT_READY = "not_ready"  # torch is not loaded yet
    RUNNING = "running"
    BUSY = "busy"  # inside a coalesced block or the creation of a group: will not park now
    PARKED = "parked"
    ENDED = "ended"  # the interpreter is exiting or the process is gone


class Place(StrEnum):
    """Where a parked rank stands."""

    NOWHERE = ""
    BOUNDARY = "boundary"
    GATE = "gate"
    PYTHON = "python"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank shall do from now on; replaces the order before it.

    `targets` names only what the rank has still to reach, except in a final order, where it names
    every counter of the stand. A key that is not named has target 0, which every counter meets and
    which holds the next operation.
    """

    request: int
    serial: int
    level: Level
    targets: Mapping[Key, int] = field(default_factory=dict)
    final: bool = False

    def to_wire(self) -> Wire:
        """Return the plain form."""
        return {
            "request": self.request,
            "serial": self.serial,
            "level": int(self.level),
            "targets": {str(key): target for key, target in self.targets.items()},
            "final": self.final,
        }

    @classmethod
    def from_wire(cls, wire: Wire) -> Order:
        """Return the order with this plain form."""
        return cls(
            request=wire["request"],
            serial=wire["serial"],
            level=Level(wire["level"]),
            targets={parse_key(key): target for key, target in wire["targets"].items()},
            final=wire["final"],
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself.

    Attributes:
        rank: global rank.
        request: the request that is answered.
        serial: of the last order that the rank has taken, 0 before the first.
        sequence: grows by at least one from report to report of a rank, so that a late one is
            known as such.
        waiting: the key of every thread that is held at a gate, each once.
        counters: every counter of the rank that is not 0; never forgotten, not even when a group
            is destroyed.
        groups: global ranks of each group that `counters` or `waiting` names; may leave out what
            was said before.
        steps: optimizer steps ended so far.
        stack: Python stack of the main thread, for people.
    """

    rank: int
    request: int
    serial: int
    sequence: int
    state: State
    place: Place = Place.NOWHERE
    waiting: tuple[Key, ...] = ()
    counters: Mapping[Key, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    steps: int = 0
    seconds_per_step: float = 0.0
    stack: str = ""

    def to_wire(self) -> Wire:
        """Return the plain form."""
        return {
            "rank": self.rank,
            "request": self.request,
            "serial": self.serial,
            "sequence": self.sequence,
            "state": str(self.state),
            "place": str(self.place),
            "waiting": [str(key) for key in self.waiting],
            "counters": {str(key): count for key, count in self.counters.items()},
            "groups": {group: list(members) for group, members in self.groups.items()},
            "steps": self.steps,
            "seconds_per_step": self.seconds_per_step,
            "stack": self.stack,
        }

    @classmethod
    def from_wire(cls, wire: Wire) -> Report:
        """Return the report with this plain form."""
        return cls(
            rank=wire["rank"],
            request=wire["request"],
            serial=wire["serial"],
            sequence=wire["sequence"],
            state=State(wire["state"]),
            place=Place(wire.get("place", "")),
            waiting=tuple(parse_key(key) for key in wire.get("waiting", ())),
            counters={parse_key(key): count for key, count in wire.get("counters", {}).items()},
            groups={group: tuple(ranks) for group, ranks in wire.get("groups", {}).items()},
            steps=wire.get("steps", 0),
            seconds_per_step=wire.get("seconds_per_step", 0.0),
            stack=wire.get("stack", ""),
        )
