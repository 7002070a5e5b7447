"""Receives that take a message from any source.

A port is one destination with one tag in one group. Once somebody receives there from any source,
sends and receives can only be compared as totals: which sender a receive will be paired with is
not known, so no target of a single sender follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torchmig.cut.keys import ANY_SOURCE, Channel, Direction


class PortName(NamedTuple):
    """Destination, tag and group."""

    group: str
    destination: int
    tag: int

    @classmethod
    def of(cls, key: Channel) -> PortName:
        """Return the port that `key` belongs to."""
        return cls(key.group, key.destination, key.tag)


@dataclass(slots=True)
class Port:
    """Counts at one destination, by source."""

    name: PortName
    is_open: bool = False  # somebody receives here from any source
    sends: dict[int, int] = field(default_factory=dict)
    receives: dict[int, int] = field(default_factory=dict)
    wanted: int = 0  # receives from any source that the destination must come to, whoever sends

    @property
    def any_receive(self) -> Channel:
        """The key of receives from any source."""
        name = self.name
        return Channel(name.group, ANY_SOURCE, name.destination, name.tag, Direction.RECV)

    def send(self, source: int) -> Channel:
        """Return the key of what `source` sends here."""
        name = self.name
        return Channel(name.group, source, name.destination, name.tag, Direction.SEND)

    def count(self, key: Channel, value: int) -> None:
        """Take over a counter."""
        ends = self.sends if key.direction is Direction.SEND else self.receives
        ends[key.source] = value

    def any_target(self) -> int:
        """Return how many receives from any source the destination must come to."""
        named = sum(count for source, count in self.receives.items() if source != ANY_SOURCE)
        return max(self.wanted, sum(self.sends.values()) - named)

    def missing_sends(self) -> int:
        """Return how many messages are still to be sent here so that all receives are served."""
        return max(0, sum(self.receives.values()) - sum(self.sends.values()))
