"""Random programs that cannot deadlock by themselves.

A program is drawn as one sequence of events for the whole job and then cut up by rank. No event
waits for anything but what stands before it in that sequence, so there is always one that can go
on: whatever hangs later hangs because of the cut. Operations may be issued long before they are
waited for, the ends of one message or collective far apart, and ranks only ever agree on the order
within a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import NamedTuple

from torchmig.cut import ANY_SOURCE, Block, Channel, Collective, Direction, Key

ANY_TAGS = 1000  # from this tag on, a message is received from whoever sends first
CREATION = "create"


class Work(NamedTuple):
    """Time spent in Python, or in native code that no safe point interrupts."""

    seconds: float
    in_python: bool


class Post(NamedTuple):
    """Issue an operation; `handle` is what `Wait` names."""

    key: Key
    handle: int


class Wait(NamedTuple):
    """Block until an operation is complete."""

    handle: int


class Coalesced(NamedTuple):
    """Issue operations in one block."""

    block: Block
    posts: tuple[Post, ...]


class Create(NamedTuple):
    """Create a group: all must call, and the new group's first barrier is part of it."""

    key: Collective
    barrier: Collective | None


class Step(NamedTuple):
    """The end of an optimizer step."""


class Raise(NamedTuple):
    """Set a key of the store, or touch a file."""

    flag: int


class Await(NamedTuple):
    """Wait for a flag: in the store, in native code, or by asking again and again in Python."""

    flag: int
    how: str


Instruction = Work | Post | Wait | Coalesced | Create | Step | Raise | Await


@dataclass
class Program:
    """What each thread of each rank does; thread 0 is the main thread."""

    world_size: int
    groups: dict[str, tuple[int, ...]]
    threads: list[list[list[Instruction]]]
    has_uncounted: bool = False  # waits for something that no counter shows
    has_any_source: bool = False

    @property
    def has_threads(self) -> bool:
        return any(len(threads) > 1 for threads in self.threads)

    @property
    def has_steps(self) -> bool:
        return any(Step() in code for threads in self.threads for code in threads)

    def __str__(self) -> str:
        lines = [f"groups {self.groups}"]
        for rank, threads in enumerate(self.threads):
            for index, code in enumerate(threads):
                lines.append(f"rank {rank} thread {index}:")
                lines += [f"    {number:3} {item}" for number, item in enumerate(code)]
        return "\n".join(lines)


@dataclass
class _Draft:
    """A program while it is drawn."""

    random: Random
    program: Program
    next_handle: int = 0
    next_flag: int = 0
    next_group: int = 0
    # Ends of operations that are to be issued later, in order, with what they belong to.
    delayed: list[tuple[int, int, Post, _Operation]] = field(default_factory=list)
    unwaited: list[_Operation] = field(default_factory=list)

    def code(self, rank: int, thread: int) -> list[Instruction]:
        return self.program.threads[rank][thread]


@dataclass(eq=False)
class _Operation:
    """One collective or message: it can be waited for when all its ends are issued."""

    missing: int
    waits: list[tuple[int, int, int]]  # rank, thread, handle


SIZES = (1, 2, 2, 3, 3, 4, 4, 6, 8)


def draw_program(random: Random, max_events: int = 60, sizes: tuple[int, ...] = SIZES) -> Program:
    """Return a random program."""
    world_size = random.choice(sizes)
    thread_count = 2 if random.random() < 0.2 else 1
    threads: list[list[list[Instruction]]] = [
        [[] for _ in range(thread_count)] for _ in range(world_size)
    ]
    program = Program(world_size, {CREATION: tuple(range(world_size))}, threads)
    draft = _Draft(random, program)
    groups = [_draw_groups(draft, thread) for thread in range(thread_count)]
    kinds = _draw_kinds(random)
    for _ in range(random.randint(2, max_events)):
        thread = 0 if thread_count == 1 else random.randrange(thread_count)
        kind = random.choice(kinds)
        if kind == "collective":
            _collective(draft, thread, random.choice(groups[thread]))
        elif kind == "message":
            _message(draft, thread)
        elif kind == "pipeline":
            _pipeline(draft, thread)
        elif kind == "exchange":
            _exchange(draft, thread)
        elif kind == "gather":
            _gather(draft, thread)
        elif kind == "create":
            groups[thread].append(_create(draft, thread))
        elif kind == "step":
            _step(draft)
        elif kind == "flag":
            _flag(draft, thread)
        else:
            _work(draft, thread)
        if random.random() < 0.4:
            _settle(draft, random.random())
    _settle(draft, 1.0)
    return program


def _draw_kinds(random: Random) -> list[str]:
    """Every program has a character of its own: most have few kinds of events, and many of them."""
    kinds = ["work"]
    if random.random() < 0.75:
        kinds += ["collective"] * random.randint(1, 6)
    if random.random() < 0.5:
        kinds += ["message"] * random.randint(1, 4)
    if random.random() < 0.2:
        kinds += ["pipeline"] * random.randint(1, 2)
    if random.random() < 0.3:
        kinds += ["exchange"] * random.randint(1, 3)
    if random.random() < 0.12:
        kinds += ["gather"] * random.randint(1, 2)
    if random.random() < 0.2:
        kinds += ["create"]
    if random.random() < 0.6:
        kinds += ["step"] * random.randint(1, 3)
    if random.random() < 0.1:
        kinds += ["flag"]
    return kinds


def _draw_groups(draft: _Draft, thread: int) -> list[str]:
    """Make groups for a thread: the world, the lines of a grid or any subsets."""
    world = range(draft.program.world_size)
    random = draft.random
    sets = [tuple(world)]
    if len(world) in (4, 6, 8) and random.random() < 0.5:
        strides = {4: (1, 2), 6: (1, 2), 8: (1, 2, 4)}[len(world)]
        sizes = {4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}[len(world)]
        for stride, size in zip(strides, sizes, strict=True):
            lines = {
                tuple(sorted(r for r in world if _same_line(r, q, stride, size))) for q in world
            }
            sets += sorted(lines)
    else:
        sets += [_subset(random, world) for _ in range(random.randint(0, 4))]
    if random.random() < 0.3:
        sets = sets[1:] or sets
    return [_new_group(draft, thread, members) for members in sets]


def _same_line(rank: int, other: int, stride: int, size: int) -> bool:
    block = stride * size
    return rank // block == other // block and rank % stride == other % stride


def _subset(random: Random, world: range) -> tuple[int, ...]:
    return tuple(sorted(random.sample(world, random.randint(1, len(world)))))


def _new_group(draft: _Draft, thread: int, members: tuple[int, ...]) -> str:
    name = f"g{draft.next_group}t{thread}"
    draft.next_group += 1
    draft.program.groups[name] = members
    return name


def _post(
    draft: _Draft, rank: int, thread: int, post: Post, operation: _Operation, late: float
) -> None:
    """Issue one end now, or with probability `late` some time later."""
    if draft.random.random() < late:
        draft.delayed.append((rank, thread, post, operation))
        return
    _release(draft, lambda item: item[0] == rank and item[2].key == post.key)
    draft.code(rank, thread).append(post)
    operation.missing -= 1


def _release(draft: _Draft, chosen) -> None:
    """Issue the delayed ends that are chosen, in their order."""
    keep = []
    for item in draft.delayed:
        if chosen(item):
            rank, thread, post, operation = item
            draft.code(rank, thread).append(post)
            operation.missing -= 1
        else:
            keep.append(item)
    draft.delayed = keep


def _settle(draft: _Draft, share: float) -> None:
    """Issue a share of what is delayed and wait for a share of what can be waited for."""
    random = draft.random
    # By rank and key, since the order within a key is what ranks must agree on.
    picked = {
        (item[0], item[2].key) for item in draft.delayed if share == 1.0 or random.random() < share
    }
    _release(draft, lambda item: (item[0], item[2].key) in picked)
    keep = []
    for operation in draft.unwaited:
        if operation.missing or (share < 1.0 and random.random() > share):
            keep.append(operation)
            continue
        random.shuffle(operation.waits)
        for rank, thread, handle in operation.waits:
            if random.random() < 0.9:  # some works are never waited for
                draft.code(rank, thread).append(Wait(handle))
    draft.unwaited = keep


def _operate(
    draft: _Draft, ends: list[tuple[int, int, Key]], is_async: bool, late: float
) -> _Operation:
    """Issue one operation at all its ends and, unless it is asynchronous, wait for it."""
    operation = _Operation(len(ends), [])
    for rank, thread, key in ends:
        handle = draft.next_handle
        draft.next_handle += 1
        operation.waits.append((rank, thread, handle))
        _post(draft, rank, thread, Post(key, handle), operation, late if is_async else 0.0)
    if is_async:
        draft.unwaited.append(operation)
    else:
        for rank, thread, handle in operation.waits:
            draft.code(rank, thread).append(Wait(handle))
    return operation


def _collective(draft: _Draft, thread: int, group: str) -> None:
    is_async = draft.random.random() < 0.4
    members = list(draft.program.groups[group])
    draft.random.shuffle(members)
    _operate(draft, [(rank, thread, Collective(group)) for rank in members], is_async, 0.25)


def _channel(draft: _Draft, thread: int, source: int, destination: int) -> Channel:
    # Odd tags rendezvous: the send completes with its receive. Even ones are buffered.
    tag = 2 * thread + draft.random.randint(0, 1)
    return Channel(CREATION, source, destination, tag, Direction.SEND)


def _message(draft: _Draft, thread: int) -> None:
    if draft.program.world_size < 2:
        return
    source, destination = draft.random.sample(range(draft.program.world_size), 2)
    key = _channel(draft, thread, source, destination)
    is_async = draft.random.random() < 0.5
    ends = [(source, thread, key), (destination, thread, key.partner)]
    _operate(draft, ends, is_async, 0.3)


def _pipeline(draft: _Draft, thread: int) -> None:
    """Micro-batches forth and back through all ranks, the later ones before the first is back."""
    ranks = list(range(draft.program.world_size))
    if len(ranks) < 2:
        return
    if draft.random.random() < 0.5:
        ranks.reverse()
    for _ in range(draft.random.randint(1, 3)):
        hops = list(pairwise(ranks))
        for source, destination in hops + [(b, a) for a, b in reversed(hops)]:
            key = _channel(draft, thread, source, destination)
            ends = [(destination, thread, key.partner), (source, thread, key)]
            _operate(draft, ends, draft.random.random() < 0.7, 0.4)
    if draft.random.random() < 0.7:
        _settle(draft, 1.0)


def _exchange(draft: _Draft, thread: int) -> None:
    """Some ranks send and receive in coalesced blocks; others take part with plain calls."""
    size = draft.program.world_size
    if size < 2:
        return
    random = draft.random
    ring = random.sample(range(size), random.randint(2, size))
    posts: dict[int, list[Post]] = {rank: [] for rank in ring}
    operations = []
    for source, destination in zip(ring, ring[1:] + ring[:1], strict=True):
        key = _channel(draft, thread, source, destination)
        operation = _Operation(0, [])
        for rank, end in ((source, key), (destination, key.partner)):
            _release(draft, lambda item, rank=rank, end=end: item[0] == rank and item[2].key == end)
            posts[rank].append(Post(end, draft.next_handle))
            operation.waits.append((rank, thread, draft.next_handle))
            draft.next_handle += 1
        operations.append(operation)
    for rank, items in posts.items():
        code = draft.code(rank, thread)
        if random.random() < 0.8:
            code.append(Coalesced(Block(f"{CREATION}t{thread}", rank), tuple(items)))
        else:
            code += items
    draft.unwaited += operations
    if random.random() < 0.6:
        _settle(draft, 1.0)


def _gather(draft: _Draft, thread: int) -> None:
    """One rank receives from any source what some others send, and may answer."""
    size = draft.program.world_size
    if size < 2:
        return
    random = draft.random
    draft.program.has_any_source = True
    receiver, *senders = random.sample(range(size), random.randint(2, size))
    tag = ANY_TAGS + thread
    for source in senders:
        send = Channel(CREATION, source, receiver, tag, Direction.SEND)
        receive = Channel(CREATION, ANY_SOURCE, receiver, tag, Direction.RECV)
        ends = [(receiver, thread, receive), (source, thread, send)]
        _operate(draft, ends, random.random() < 0.5, 0.0)
        if random.random() < 0.4:
            key = _channel(draft, thread, receiver, source)
            _operate(draft, [(receiver, thread, key), (source, thread, key.partner)], False, 0.0)


def _create(draft: _Draft, thread: int) -> str:
    """All ranks create a group; its members go through its first barrier while they do."""
    world = range(draft.program.world_size)
    members = _subset(draft.random, world)
    name = _new_group(draft, thread, members)
    pseudo = CREATION if thread == 0 else f"{CREATION}t{thread}"
    draft.program.groups[pseudo] = tuple(world)
    has_barrier = draft.random.random() < 0.5
    for rank in world:
        barrier = Collective(name) if has_barrier and rank in members else None
        draft.code(rank, thread).append(Create(Collective(pseudo), barrier))
    return name


def _step(draft: _Draft) -> None:
    """Ranks end an optimizer step: mostly all of them, mostly with nothing in flight."""
    random = draft.random
    if random.random() < 0.6:
        _settle(draft, 1.0)
    world = range(draft.program.world_size)
    ranks = world if random.random() < 0.8 else _subset(random, world)
    for rank in ranks:
        draft.code(rank, 0).append(Step())


def _flag(draft: _Draft, thread: int) -> None:
    """One rank waits for another in a way that no counter shows."""
    random = draft.random
    draft.program.has_uncounted = True
    world = range(draft.program.world_size)
    draft.code(random.choice(world), thread).append(Raise(draft.next_flag))
    how = random.choice(["store", "native", "python"])
    draft.code(random.choice(world), thread).append(Await(draft.next_flag, how))
    draft.next_flag += 1


def _work(draft: _Draft, thread: int) -> None:
    random = draft.random
    for rank in _subset(random, range(draft.program.world_size)):
        seconds = random.choice([0.001, 0.005, 0.02, 0.05])
        draft.code(rank, thread).append(Work(seconds, random.random() < 0.7))
