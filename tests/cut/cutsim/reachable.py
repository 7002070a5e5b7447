"""What a cut is, and the first one that a program can reach, worked out from the program itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutsim.programs import Coalesced, Create, Instruction, Post, Program
from torchmig.cut import ANY_SOURCE, Block, Channel, Collective, Direction, Key

Counters = Mapping[Key, int]
Groups = Mapping[str, tuple[int, ...]]


def is_cut(counters: Sequence[Counters], groups: Groups) -> bool:
    """Say whether nothing is half done at these counters."""
    ports: dict[tuple[str, int, int], list[int]] = {}
    for mine in counters:
        for key, count in mine.items():
            if isinstance(key, Collective):
                if any(counters[member].get(key, 0) != count for member in groups[key.group]):
                    return False
            elif isinstance(key, Channel):
                totals = ports.setdefault((key.group, key.destination, key.tag), [0, 0])
                totals[key.direction is Direction.RECV] += count
    if any(sent != received for sent, received in ports.values()):
        return False
    for mine in counters:
        for key, count in mine.items():
            if isinstance(key, Channel) and key.source != ANY_SOURCE:
                name = (key.group, key.destination, key.tag)
                if _is_open(counters, *name):
                    continue
                end = key.destination if key.direction is Direction.SEND else key.source
                if counters[end].get(key.partner, 0) != count:
                    return False
    return True


def _is_open(counters: Sequence[Counters], group: str, destination: int, tag: int) -> bool:
    key = Channel(group, ANY_SOURCE, destination, tag, Direction.RECV)
    return counters[destination].get(key, 0) > 0


def first_cut(program: Program, bases: Sequence[Counters]) -> list[dict[Key, int]] | None:
    """Return the counters at the first cut after `bases`, None if there is none before the end.

    For programs of one thread a rank, without receives from any source.
    """
    walkers = [
        _Walker(threads[0], rank, base)
        for rank, (threads, base) in enumerate(zip(program.threads, bases, strict=True))
    ]
    needs: dict[Key, int] = {}
    news = [item for walker in walkers for item in walker.counts.items()]
    while news:
        for key, count in news:
            for end in (key, key.partner) if isinstance(key, Channel) else (key,):
                needs[end] = max(needs.get(end, 0), count)
        news = []
        for walker in walkers:
            while walker.lacks(needs, program.groups):
                passed = walker.advance()
                if passed is None:
                    return None
                news += [(key, walker.counts[key]) for key in passed]
    return [walker.counts for walker in walkers]


def total_counters(code: Sequence[Instruction], rank: int) -> dict[Key, int]:
    """Return the counters of a rank at its end."""
    walker = _Walker(code, rank, {})
    while walker.advance() is not None:
        pass
    return walker.counts


class _Walker:
    """One rank's way through its operations; a block or a creation is passed as a whole."""

    def __init__(self, code: Sequence[Instruction], rank: int, base: Counters) -> None:
        self.rank = rank
        self.ahead = [keys for keys in map(_keys, code) if keys]
        self.ahead.reverse()
        self.counts: dict[Key, int] = {}
        while any(self.counts.get(key, 0) < count for key, count in base.items()):
            assert self.advance() is not None

    def advance(self) -> tuple[Key, ...] | None:
        if not self.ahead:
            return None
        keys = self.ahead.pop()
        for key in keys:
            self.counts[key] = self.counts.get(key, 0) + 1
        return keys

    def lacks(self, needs: Mapping[Key, int], groups: Groups) -> bool:
        return any(
            count > self.counts.get(key, 0) and self.rank in members(key, groups)
            for key, count in needs.items()
        )


def members(key: Key, groups: Groups) -> tuple[int, ...]:
    """Return the ranks that issue operations on `key`."""
    if isinstance(key, Collective):
        return groups[key.group]
    if isinstance(key, Block):
        return (key.rank,)
    return (key.source if key.direction is Direction.SEND else key.destination,)


def _keys(item: Instruction) -> tuple[Key, ...]:
    if isinstance(item, Post):
        return (item.key,)
    if isinstance(item, Coalesced):
        return (item.block, *(post.key for post in item.posts))
    if isinstance(item, Create):
        return (item.key,) if item.barrier is None else (item.key, item.barrier)
    return ()
