"""What operations do to each other: who waits for whom, and what comes out.

No time and no cut in here. `run_alone` gives the results of a program that nobody asks anything of.
"""

from __future__ import annotations

from cutsim.programs import (
    ANY_TAGS,
    Await,
    Coalesced,
    Create,
    Post,
    Program,
    Raise,
    Wait,
)
from torchmig.cut import ANY_SOURCE, Channel, Collective, Direction, Key

_MASK = (1 << 61) - 1
Line = tuple[str, int, int, int] | str  # what the ends of one operation have in common


class Machine:
    """Counts of what was really issued, values on their way, and flags."""

    def __init__(self, program: Program) -> None:
        self.groups = program.groups
        self.issued: dict[tuple[Key, int], int] = {}
        self.totals: dict[Line, int] = {}  # sends to a port
        self.arrived: dict[tuple[str, int], int] = {}
        self.values: dict[tuple[Line, int], int] = {}
        self.flags: set[int] = set()
        self.posts = 0

    def post(self, rank: int, key: Key, value: int) -> int:
        """Issue an operation and return its number among those of the rank on this key."""
        self.posts += 1
        number = self.issued.get((key, rank), 0) + 1
        self.issued[key, rank] = number
        if isinstance(key, Collective):
            slot = (key.group, number)
            self.arrived[slot] = self.arrived.get(slot, 0) + 1
            self.values[slot] = self.values.get(slot, 0) + value
        elif isinstance(key, Channel) and key.direction is Direction.SEND:
            self.values[line_of(key), number] = value
            port = (key.group, ANY_SOURCE, key.destination, key.tag)
            self.totals[port] = self.totals.get(port, 0) + 1
        return number

    def is_complete(self, key: Key, number: int) -> bool:
        """Say whether the `number`-th operation of a rank on `key` is done."""
        if isinstance(key, Collective):
            return self.arrived.get((key.group, number), 0) == len(self.groups[key.group])
        assert isinstance(key, Channel)
        if key.direction is Direction.SEND:
            if key.tag % 2 == 0 or key.tag >= ANY_TAGS:
                return True
            return self.issued.get((key.partner, key.destination), 0) >= number
        if key.source == ANY_SOURCE:
            return self.totals.get(line_of(key), 0) >= number
        return self.issued.get((key.partner, key.source), 0) >= number

    def result(self, key: Key, number: int) -> int:
        """Return what a complete operation gives; the same whatever the timing was."""
        if isinstance(key, Collective):
            return self.values[key.group, number]
        assert isinstance(key, Channel)
        if key.direction is Direction.SEND or key.source == ANY_SOURCE:
            return 1
        return self.values[line_of(key), number]


def line_of(key: Key) -> Line:
    """Return what a waiter on `key` waits for."""
    if isinstance(key, Channel):
        return (key.group, key.source, key.destination, key.tag)
    return key.group


def wake_lines(key: Key) -> tuple[Line, ...]:
    """Return the lines whose waiters an operation on `key` may complete."""
    if isinstance(key, Channel) and key.tag >= ANY_TAGS:
        return ((key.group, ANY_SOURCE, key.destination, key.tag),)
    return (line_of(key),)


def mix(state: int, value: int) -> int:
    """Return a thread's state after it has taken in a result."""
    return (state * 1_000_003 + value) & _MASK


class Abacus:
    """State and handles of one thread."""

    __slots__ = ("handles", "state")

    def __init__(self, rank: int, thread: int) -> None:
        self.state = 7919 * rank + thread + 1
        self.handles: dict[int, tuple[Key, int]] = {}


def run_alone(program: Program) -> list[list[int]]:
    """Return the final state of every thread when nobody disturbs the program."""
    machine = Machine(program)
    threads = [
        (rank, code, Abacus(rank, index))
        for rank, codes in enumerate(program.threads)
        for index, code in enumerate(codes)
    ]
    positions = [0] * len(threads)
    entered: list[list[tuple[Key, int]]] = [[] for _ in threads]
    moved = True
    while moved:
        moved, before = False, machine.posts
        for index, (rank, code, abacus) in enumerate(threads):
            while positions[index] < len(code):
                if not _execute(machine, rank, code[positions[index]], abacus, entered[index]):
                    break
                positions[index] += 1
                moved = True
        moved = moved or machine.posts > before  # a group's creation is left and entered again
    for (rank, code, _), position in zip(threads, positions, strict=True):
        assert position == len(code), f"program hangs by itself: rank {rank} at {position}"
    results: list[list[int]] = [[] for _ in program.threads]
    for rank, _, abacus in threads:
        results[rank].append(abacus.state)
    return results


def _execute(machine, rank, item, abacus, entered) -> bool:
    """Execute an instruction if it need not wait."""
    if isinstance(item, Post):
        number = machine.post(rank, item.key, abacus.state)
        abacus.handles[item.handle] = (item.key, number)
    elif isinstance(item, Wait):
        key, number = abacus.handles[item.handle]
        if not machine.is_complete(key, number):
            return False
        abacus.state = mix(abacus.state, machine.result(key, number))
    elif isinstance(item, Coalesced):
        for post in item.posts:
            number = machine.post(rank, post.key, abacus.state)
            abacus.handles[post.handle] = (post.key, number)
    elif isinstance(item, Create):
        keys = [item.key] if item.barrier is None else [item.key, item.barrier]
        while True:
            if entered:
                if not machine.is_complete(*entered[-1]):
                    return False
                abacus.state = mix(abacus.state, machine.result(*entered[-1]))
            if len(entered) == len(keys):
                break
            key = keys[len(entered)]
            entered.append((key, machine.post(rank, key, abacus.state)))
        entered.clear()
    elif isinstance(item, Raise):
        machine.flags.add(item.flag)
    elif isinstance(item, Await):
        return item.flag in machine.flags
    return True
