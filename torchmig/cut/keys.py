"""What a gate counts: one counter a key.

A key names a stream of operations whose ends must agree at a cut. Its text form is what travels
between rank, agent and coordinator, and what the C++ gate uses as the name of a counter; the group
comes last because its name may hold anything.

Keys are tuples because they are hashed far more often than anything else is done here; no two kinds
have equally many fields, so none equals another.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

ANY_SOURCE = -1


class Direction(StrEnum):
    """The two ends of a channel."""

    SEND = "send"
    RECV = "recv"


class Collective(NamedTuple):
    """Operations that all members of a group issue equally often, creation of groups included."""

    group: str

    def __str__(self) -> str:
        return f"collective/{self.group}"


class Channel(NamedTuple):
    """One end of the messages from `source` to `destination`, both global ranks, under one tag.

    `source` is ANY_SOURCE for receives that take a message from whoever sends first.
    """

    group: str
    source: int
    destination: int
    tag: int
    direction: Direction

    def __str__(self) -> str:
        return f"{self.direction}/{self.source}/{self.destination}/{self.tag}/{self.group}"

    @property
    def partner(self) -> Channel:
        """The other end; for a receive from any source there is no single one."""
        other = Direction.RECV if self.direction is Direction.SEND else Direction.SEND
        return Channel(self.group, self.source, self.destination, self.tag, other)


class Block(NamedTuple):
    """Coalesced blocks of one rank on a group: what is in one is known once it is through."""

    group: str
    rank: int

    def __str__(self) -> str:
        return f"block/{self.rank}/{self.group}"


Key = Collective | Channel | Block


@lru_cache(maxsize=65536)
def parse_key(text: str) -> Key:
    """Return the key whose text form is `text`.

    Raises:
        ValueError: `text` is no key.
    """
    kind, _, rest = text.partition("/")
    try:
        if kind == "collective":
            return Collective(rest)
        if kind == "block":
            rank, group = rest.split("/", 1)
            return Block(group, int(rank))
        source, destination, tag, group = rest.split("/", 3)
        return Channel(group, int(source), int(destination), int(tag), Direction(kind))
    except ValueError as error:
        raise ValueError(f"{text!r} is not the text form of a key") from error
