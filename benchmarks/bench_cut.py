"""Count what a cut costs in messages, rounds and planner time, for jobs of growing size.

    python -m benchmarks.bench_cut                    up to 16,384 ranks on 2,048 nodes
    python -m benchmarks.bench_cut --json cut.json    also as raw figures

Simulated jobs train on a three-dimensional grid: tensor parallel inside a node, pipeline stages
that pass micro-batches on with point-to-point messages, data parallel across, and one collective
of the whole world before the optimizer step. A round
is: every node sends one message with what has changed for its ranks, the planner decides once,
    every node concerned gets one message, and the ranks run until they are held, blocked or
    parked. Messages go through the real packing.

"step" is a job whose ranks stop at a step boundary; in "gate" they report no steps and are held
between operations, in the middle of the pipeline, where targets must be raised through all stages.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgpack

from torchmig.cut import (
    Channel,
    Collective,
    Direction,
    Key,
    Level,
    Order,
    Pending,
    Place,
    Planner,
    PlannerOptions,
    Report,
    Stand,
    State,
    holds,
    pack_orders,
    pack_reports,
    parks,
    split_orders,
    unpack_orders,
    unpack_reports,
)

NODE_SIZE = 8
MICRO_BATCHES = 8
STEPS = 2
BUDGET = 40  # operations of a rank before the request: in the middle of a step
GRIDS = ((8, 4, 8), (8, 8, 32), (8, 16, 128))  # tensor, pipeline, data


@dataclass
class Figures:
    """What one simulated request cost."""

    ranks: int
    nodes: int
    grid: tuple[int, int, int]
    mode: str
    rounds: int = 0
    messages_to_coordinator: int = 0
    messages_to_nodes: int = 0
    reports: int = 0
    orders: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    slowest_decision_seconds: float = 0.0
    planner_seconds: float = 0.0
    packing_seconds: float = 0.0
    planner_memory_bytes: int = 0


@dataclass(eq=False)
class Rank:
    """One rank: its next operation, what it has counted, and the order that it is under."""

    index: int
    groups: dict[str, tuple[int, ...]]
    program: Iterator[Key | None]
    counters: dict[Key, int] = field(default_factory=dict)
    order: Order = field(default_factory=lambda: Order(1, 0, Level.FREE))
    next_key: Key | None = None  # None: a step boundary
    blocked_on: Key | None = None
    is_waiting: bool = False  # among those who are woken when it is complete
    steps: int = 0
    sequence: int = 0
    state: State = State.RUNNING
    place: Place = Place.NOWHERE
    has_news: bool = False


class Job:
    """All ranks, running as fast as their operations let them."""

    def __init__(self, grid: tuple[int, int, int], seed: int) -> None:
        self.tensor, self.pipeline, self.data = grid
        self.size = self.tensor * self.pipeline * self.data
        self.random = random.Random(seed)
        self.waiters: dict[object, list[Rank]] = {}
        self.arrived: dict[tuple[str, int], int] = {}
        world = tuple(range(self.size))
        tensor_groups = {
            first: tuple(range(first, first + self.tensor))
            for first in range(0, self.size, self.tensor)
        }
        stage = self.tensor * self.pipeline
        data_groups = {first: tuple(range(first, self.size, stage)) for first in range(stage)}
        self.ranks = []
        for index in world:
            groups = {
                "world": world,
                f"tp{index // self.tensor}": tensor_groups[index - index % self.tensor],
                f"dp{index % stage}": data_groups[index % stage],
            }
            self.ranks.append(Rank(index, groups, self._program(index)))
        for rank in self.ranks:
            rank.next_key = next(rank.program)

    def _program(self, index: int) -> Iterator[Key | None]:
        """Operations of one rank: forward and backward of every micro-batch, then the step."""
        stage = index // self.tensor % self.pipeline
        tensor = Collective(f"tp{index // self.tensor}")
        data = Collective(f"dp{index % (self.tensor * self.pipeline)}")
        before, after = index - self.tensor, index + self.tensor
        warm_up = min(MICRO_BATCHES, self.pipeline - stage - 1)

        def forward() -> Iterator[Key]:
            if stage > 0:
                yield Channel("world", before, index, 0, Direction.RECV)
            yield tensor
            yield tensor
            if stage < self.pipeline - 1:
                yield Channel("world", index, after, 0, Direction.SEND)

        def backward() -> Iterator[Key]:
            if stage < self.pipeline - 1:
                yield Channel("world", after, index, 0, Direction.RECV)
            yield tensor
            yield tensor
            if stage > 0:
                yield Channel("world", index, before, 0, Direction.SEND)

        for _ in range(STEPS):
            for _ in range(warm_up):
                yield from forward()
            for _ in range(MICRO_BATCHES - warm_up):
                yield from forward()
                yield from backward()
            for _ in range(warm_up):
                yield from backward()
            yield data
            yield Collective("world")
            yield None

    def advance(self, ranks: list[Rank], budget: int | None = None) -> None:
        """Let ranks run until they cannot; with a budget, until that many operations are issued."""
        todo = list(ranks)
        while todo and budget != 0:
            if budget is not None:  # in any order, so that they come to be at different places
                place = self.random.randrange(len(todo))
                todo[place], todo[-1] = todo[-1], todo[place]
            rank = todo.pop()
            if rank.is_waiting or not self._step(rank, todo):
                continue
            budget = None if budget is None else budget - 1
            todo.append(rank)

    def _step(self, rank: Rank, todo: list[Rank]) -> bool:
        if rank.blocked_on is not None:
            key = rank.blocked_on
            if not self._is_complete(rank, key):
                self.waiters.setdefault(self._line(key), []).append(rank)
                rank.is_waiting = True
                return False
            rank.blocked_on = None
        key = rank.next_key
        if key is None:
            if parks(rank.order, rank.counters, Place.BOUNDARY):
                self._stand(rank, Place.BOUNDARY)
                return False
        elif holds(rank.order, rank.counters, key):
            self._stand(rank, Place.GATE)
            return False
        rank.state, rank.place, rank.has_news = State.RUNNING, Place.NOWHERE, True
        if key is None:
            rank.steps += 1
        else:
            self._issue(rank, key, todo)
        rank.next_key = next(rank.program, None)
        return True

    @staticmethod
    def _stand(rank: Rank, place: Place) -> None:
        rank.has_news = rank.has_news or rank.state is not State.PARKED
        rank.state, rank.place = State.PARKED, place

    def _issue(self, rank: Rank, key: Key, todo: list[Rank]) -> None:
        count = rank.counters[key] = rank.counters.get(key, 0) + 1
        if isinstance(key, Collective):
            slot = (key.group, count)
            self.arrived[slot] = self.arrived.get(slot, 0) + 1
        rank.blocked_on = key
        if not isinstance(key, Collective) or self._is_complete(rank, key):
            for waiter in self.waiters.pop(self._line(key), ()):
                waiter.is_waiting = False
                todo.append(waiter)

    def _is_complete(self, rank: Rank, key: Key) -> bool:
        if isinstance(key, Collective):
            return self.arrived[key.group, rank.counters[key]] == len(rank.groups[key.group])
        assert isinstance(key, Channel)
        if key.direction is Direction.SEND:
            return True
        return self.ranks[key.source].counters.get(key.partner, 0) >= rank.counters[key]

    @staticmethod
    def _line(key: Key) -> object:
        return key if isinstance(key, Collective) else key[:4]


def run(
    grid: tuple[int, int, int], mode: str, seed: int = 0, *, measure_memory: bool = False
) -> Figures:
    """Stop a simulated job once and count; times mean little while memory is measured."""
    job = Job(grid, seed)
    figures = Figures(job.size, job.size // NODE_SIZE, grid, mode)
    job.advance(job.ranks, budget=job.size * BUDGET)
    if measure_memory:
        tracemalloc.start()
    planner = Planner(job.size, 1, PlannerOptions())
    known: dict[int, set[str]] = {}
    now = 0.0
    orders = planner.start(now)
    while True:
        # Without steps the first order only asks where everybody is.
        deliver(job, orders, figures, move=mode == "step" or figures.rounds > 0)
        messages = gather(job, known, mode, figures)
        started_at = time.process_time()
        reports = [report for message in messages for report in unpack_reports(read(message))]
        unpacked_at = time.process_time()
        now += 0.001
        orders = planner.reports(reports, now)
        seconds = time.process_time() - unpacked_at
        figures.packing_seconds += unpacked_at - started_at
        figures.planner_seconds += seconds
        figures.slowest_decision_seconds = max(figures.slowest_decision_seconds, seconds)
        figures.rounds += 1
        del messages, reports
        if not isinstance(planner.verdict, Pending):
            break
        if not orders:
            raise RuntimeError(f"no progress:\n{planner.explain(now)}")
    if measure_memory:
        figures.planner_memory_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    if not isinstance(planner.verdict, Stand):
        raise RuntimeError(str(planner.verdict))
    return figures


def read(message: bytes) -> dict[str, object]:
    """Return what a message holds."""
    return msgpack.unpackb(message)


def deliver(job: Job, orders: list[tuple[int, Order]], figures: Figures, *, move: bool) -> None:
    """Bring orders to their ranks, by node, and let the ranks run."""
    concerned = []
    for node_orders in split_orders(orders, lambda rank: rank // NODE_SIZE).values():
        message = msgpack.packb(pack_orders(node_orders))
        figures.messages_to_nodes += 1
        figures.bytes_sent += len(message)
        for index, order in unpack_orders(read(message)):
            figures.orders += 1
            rank = job.ranks[index]
            rank.order = order
            rank.has_news = True
            concerned.append(rank)
    if move:
        job.advance(concerned)


def gather(job: Job, known: dict[int, set[str]], mode: str, figures: Figures) -> list[bytes]:
    """Return one message for each node that has news."""
    nodes: dict[int, list[Report]] = {}
    for rank in job.ranks:
        if not rank.has_news:
            continue
        rank.has_news = False
        rank.sequence += 1
        nodes.setdefault(rank.index // NODE_SIZE, []).append(
            Report(
                rank=rank.index,
                request=1,
                serial=rank.order.serial,
                sequence=rank.sequence,
                state=rank.state,
                place=rank.place,
                waiting=(rank.next_key,) if rank.place is Place.GATE and rank.next_key else (),
                counters=rank.counters,
                groups=rank.groups,
                steps=rank.steps + 1 if mode == "step" else 0,
            )
        )
    messages = []
    for node, reports in nodes.items():
        wire = pack_reports(reports, known.setdefault(node, set()))
        messages.append(msgpack.packb(wire))
        figures.reports += len(reports)
        figures.bytes_received += len(messages[-1])
    figures.messages_to_coordinator += len(messages)
    return messages


def main() -> int:
    """Run what the command line asks for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write raw figures here")
    options = parser.parse_args()
    print(
        f"{'ranks':>7} {'nodes':>6} {'mode':5} {'rounds':>6} {'messages':>9} "
        f"{'a node and round':>16}"
        f" {'orders':>8} {'MB in':>6} {'MB out':>6} {'slowest decision':>16} {'planner':>8}"
        f" {'bytes/rank':>10}"
    )
    results = []
    memory = 0
    for grid in GRIDS:
        for mode in ("step", "gate"):
            figures = run(grid, mode)
            if mode == "step":
                memory = run(grid, mode, measure_memory=True).planner_memory_bytes
            figures.planner_memory_bytes = memory
            results.append(figures)
            messages = figures.messages_to_coordinator + figures.messages_to_nodes
            share = figures.messages_to_coordinator / figures.nodes / figures.rounds
            print(
                f"{figures.ranks:7,} {figures.nodes:6,} {mode:5} {figures.rounds:6} {messages:9,}"
                f" {share:16.2f} {figures.orders:8,} {figures.bytes_received / 1e6:6.1f}"
                f" {figures.bytes_sent / 1e6:6.1f} {figures.slowest_decision_seconds:14.3f} s"
                f" {figures.planner_seconds:6.2f} s"
                f" {figures.planner_memory_bytes / figures.ranks:10,.0f}",
                flush=True,
            )
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        raw = {"machine": machine, "results": [asdict(figures) for figures in results]}
        options.json.write_text(json.dumps(raw, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
