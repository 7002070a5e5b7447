"""Counters of all ranks, the targets that follow from them, and who has not reached which.

Everything is kept up as reports come in: a report costs its own length, a raised target costs one
look at each member of its group, and memory is one entry a rank and key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchmig.cut.keys import ANY_SOURCE, Block, Channel, Collective, Direction, Key
from torchmig.cut.ports import Port, PortName


class GroupMismatchError(ValueError):
    """Two ranks give different members for one group, or none at all."""


class Ledger:
    """Who has issued what, and how far everybody must come.

    `targets` never fall, except at a port that turns out to be open. `missing[rank]` holds the
    keys that the rank has not reached. `changed` collects the ranks for whom something changed,
    until the planner takes them.
    """

    def __init__(self, world_size: int) -> None:
        self.counters: list[dict[Key, int]] = [{} for _ in range(world_size)]
        self.targets: dict[Key, int] = {}
        self.missing: list[set[Key]] = [set() for _ in range(world_size)]
        self.groups: dict[str, tuple[int, ...]] = {}
        self._latest_groups: Mapping[str, tuple[int, ...]] = {}
        self.lacking: set[int] = set()  # ranks with something in `missing`
        self.changed: set[int] = set()
        self._raised: dict[Key, int] = {}  # maxima that are still to be made targets
        self._ports: dict[PortName, Port] = {}
        self._hungry: dict[PortName, set[int]] = {}  # ports lacking sends: who runs

    def learn_groups(self, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Take over members of groups.

        Raises:
            GroupMismatchError: a group is known with other members.
        """
        if groups is self._latest_groups:
            return  # reports of one message share the mapping
        self._latest_groups = groups
        for group, members in groups.items():
            known = self.groups.get(group)
            if known is None:
                if not members:
                    raise GroupMismatchError(
                        f"group {group!r} was made outside torch.distributed: "
                        "its members are not known"
                    )
                if min(members) < 0 or max(members) >= len(self.counters):
                    raise GroupMismatchError(
                        f"group {group!r} has members {_short(members)} "
                        f"in a job of {len(self.counters)} ranks"
                    )
                self.groups[group] = members
            elif known is not members and known != members:
                raise GroupMismatchError(
                    f"group {group!r} has members {_short(members)} on one rank "
                    f"and {_short(known)} on another"
                )

    def count(self, rank: int, counters: Mapping[Key, int]) -> bool:
        """Take over a rank's counters and say whether any of them is new.

        A counter may fall by one between two reports: an operation is counted before it is held.
        """
        mine = self.counters[rank]
        news = False
        for key, value in counters.items():
            if mine.get(key, 0) != value:
                self._know_group(key)
                self._set(rank, key, value)
                news = True
        if len(mine) > len(counters):  # a counter that was 1 and is named no more is 0 again
            for key in [key for key in mine if key not in counters]:
                self._set(rank, key, 0)
                news = True
        return news

    def expect(self, key: Key) -> None:
        """Take note that somebody is about to issue an operation on `key`.

        Raises:
            GroupMismatchError: nobody has named the members of its group.
        """
        self._know_group(key)
        if isinstance(key, Channel) and key.source == ANY_SOURCE:
            port = self._port(key)
            if not port.is_open:
                self._open(port)

    def lift(self, key: Key, value: int) -> None:
        """Let nobody stand before the `value`-th operation on `key`; takes effect with `settle`."""
        if isinstance(key, Channel) and key.source == ANY_SOURCE:
            port = self._port(key)
            if value > port.wanted:
                port.wanted = value
                self._feed(port)
        elif value > self.targets.get(key, 0):
            self._raised[key] = max(value, self._raised.get(key, 0))

    def settle(self) -> None:
        """Make maxima targets, once for all reports that came in together."""
        raised, self._raised = self._raised, {}
        for key, value in raised.items():
            for end in self._ends(key):
                if value > self.targets.get(end, 0):
                    self._target(end, value)

    def serve(self, held: Mapping[int, tuple[Key, ...]]) -> None:
        """Find senders for open ports that have more receives than sends.

        A rank that is held right before such a send is let through; if there is none, every rank
        that may send runs on until somebody has.
        """
        for name in list(self._hungry):
            port = self._ports[name]
            lacking = port.missing_sends()
            for rank in self._senders(port):
                key = port.send(rank)
                promised = self.targets.get(key, 0) - self.counters[rank].get(key, 0)
                if promised > 0:
                    lacking -= promised
                elif lacking > 0 and key in held.get(rank, ()):
                    self.lift(key, self.counters[rank].get(key, 0) + 1)
                    lacking -= 1
            runners = self._senders(port) if lacking > 0 else set()
            self._run_for(name, runners)

    def aims(self, rank: int) -> dict[Key, int]:
        """Return what the rank has still to reach, with the values."""
        mine = self.counters[rank]
        missing = tuple(self.missing[rank])  # a thread that explains may look on meanwhile
        return {key: max(self.targets.get(key, 0), mine.get(key, 0) + 1) for key in missing}

    def members(self, key: Key) -> tuple[int, ...]:
        """Return the ranks that issue operations on `key`."""
        if isinstance(key, Collective):
            return self.groups[key.group]
        if isinstance(key, Channel):
            return (key.source if key.direction is Direction.SEND else key.destination,)
        return (key.rank,)

    def _ends(self, key: Key) -> Iterable[Key]:
        """The keys that must agree with `key`, itself among them."""
        if not isinstance(key, Channel):
            return (key,)
        if key.direction is Direction.SEND and self._port(key).is_open:
            return (key,)  # who receives it is not known
        return (key, key.partner)

    def _know_group(self, key: Key) -> None:
        if key.group not in self.groups and not isinstance(key, Block):
            raise GroupMismatchError(f"nobody has named the members of group {key.group!r}")

    def _set(self, rank: int, key: Key, value: int) -> None:
        if value:
            self.counters[rank][key] = value
        else:
            del self.counters[rank][key]
        self.changed.add(rank)
        if isinstance(key, Channel):
            port = self._port(key)
            port.count(key, value)
            if key.source == ANY_SOURCE and not port.is_open:
                self._open(port)
            if port.is_open:
                self._feed(port)
                if key.source == ANY_SOURCE:
                    return
        if value > self.targets.get(key, 0):
            self._raised[key] = max(value, self._raised.get(key, 0))
        self._compare(rank, key)

    def _target(self, key: Key, value: int) -> None:
        moved = value != self.targets.get(key, 0)
        self.targets[key] = value
        for rank in self.members(key):
            self._compare(rank, key)
            if moved and key in self.missing[rank]:
                self.changed.add(rank)

    def _compare(self, rank: int, key: Key) -> None:
        lacks = self.counters[rank].get(key, 0) < self.targets.get(key, 0)
        if self._hungry and not lacks and isinstance(key, Channel):
            lacks = rank in self._hungry.get(PortName.of(key), ())
        missing = self.missing[rank]
        if lacks and key not in missing:
            missing.add(key)
            self.lacking.add(rank)
        elif not lacks and key in missing:
            missing.remove(key)
            if not missing:
                self.lacking.discard(rank)
        else:
            return
        self.changed.add(rank)

    def _port(self, key: Channel) -> Port:
        name = PortName.of(key)
        port = self._ports.get(name)
        if port is None:
            port = self._ports[name] = Port(name)
        return port

    def _open(self, port: Port) -> None:
        """Forget what was asked of single sources, now that it may come from any."""
        port.is_open = True
        rank = port.name.destination
        for source in {*port.sends, *port.receives} - {ANY_SOURCE}:
            key = port.send(source).partner
            self._raised.pop(key, None)
            self.targets[key] = self.counters[rank].get(key, 0)
            self._compare(rank, key)
        self._feed(port)

    def _feed(self, port: Port) -> None:
        """Set an open port's targets anew from its totals."""
        if not port.is_open:
            return
        self._target(port.any_receive, port.any_target())
        if port.missing_sends():
            self._hungry.setdefault(port.name, set())
        elif port.name in self._hungry:
            self._run_for(port.name, set())
            del self._hungry[port.name]

    def _run_for(self, name: PortName, runners: set[int]) -> None:
        """Let exactly `runners` go on until the port is served."""
        before = self._hungry[name]
        self._hungry[name] = runners
        for rank in before ^ runners:
            self._compare(rank, self._ports[name].send(rank))

    def _senders(self, port: Port) -> set[int]:
        """Ranks that may send to the port: all of its group but the receiver."""
        return set(self.groups[port.name.group]) - {port.name.destination}


def _short(members: tuple[int, ...]) -> str:
    if len(members) <= 8:
        return str(list(members))
    return f"[{members[0]}, {members[1]}, … {members[-1]}] ({len(members)} ranks)"
