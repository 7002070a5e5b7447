"""Time, the network and the requests around simulated ranks, and what must hold of them.

A report or an order may take long and overtake another. Everything is drawn from one seed, so that
a failure can be had
again: `python -m cutsim.soak --seed N` prints the program.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from cutsim.machine import Machine, run_alone
from cutsim.programs import SIZES, Program, draw_program
from cutsim.ranks import BLOCKED, DONE, LONGEST_LOOK_SECONDS, PARKED, SLEEPS, Rank, Thread
from cutsim.reachable import first_cut, is_cut, members, total_counters
from torchmig.cut import (
    Channel,
    Key,
    Level,
    Order,
    Orders,
    Pending,
    Planner,
    PlannerOptions,
    Report,
    Stand,
    State,
    Verdict,
    Withdrawn,
    pack_orders,
    pack_reports,
    split_orders,
    unpack_orders,
    unpack_reports,
)

TICK_SECONDS = 0.1
GATHER_SECONDS = 0.002  # how long an agent waits for more reports of its node
OPTIONS = PlannerOptions(deadline_seconds=60.0, min_patience_seconds=2.0, resend_seconds=2.0)
MakePlanner = Callable[[int, int, PlannerOptions], Planner]


class BrokenCutError(AssertionError):
    """The planner, or the rule, failed."""


@dataclass(frozen=True)
class Request:
    """A request after a pause since the last one ended, and when its user thinks better of it."""

    pause_seconds: float
    withdraw_after_seconds: float | None


@dataclass
class Outcome:
    """What came of one request."""

    verdict: Verdict
    seconds: float
    level: Level
    rounds: int
    nudges: int


@dataclass
class Scenario:
    """A program, how slow everything is, and requests."""

    program: Program
    random: Random
    speeds: list[float]
    delay_seconds: float
    requests: list[Request]
    start_seconds: list[float]
    counts_under_orders: bool  # gates count before they look also while an order is active
    wakes_late: bool  # threads that an order lets go may still be asleep when it is answered
    node_size: int | None  # ranks whose reports an agent gathers; None: no agents


def draw_scenario(random: Random, max_events: int = 60, sizes: tuple[int, ...] = SIZES) -> Scenario:
    """Return a random scenario."""
    program = draw_program(random, max_events, sizes)
    speeds = [random.choice([0.2, 1.0, 1.0, 4.0]) for _ in range(program.world_size)]
    span = max(speeds) * max(len(code) for threads in program.threads for code in threads) * 0.001
    requests = []
    count = random.choice([1, 1, 1, 2, 3])
    for _ in range(count):
        withdraw_after = random.random() * 0.1 if random.random() < 0.1 else None
        requests.append(Request(random.random() ** 2 * span / count, withdraw_after))
    is_late = random.random() < 0.1
    return Scenario(
        program=program,
        random=random,
        speeds=speeds,
        delay_seconds=random.choice([0.0002, 0.002, 0.002, 0.02]),
        requests=requests,
        start_seconds=[
            random.random() * 0.1 if is_late else 0.0 for _ in range(program.world_size)
        ],
        counts_under_orders=random.random() < 0.5,
        wakes_late=random.random() < 0.3,
        node_size=random.choice([1, 2, 3]) if random.random() < 0.15 else None,
    )


class Simulation:
    """One scenario, run to its end by `run`."""

    def __init__(self, scenario: Scenario, make_planner: MakePlanner = Planner) -> None:
        self.program = scenario.program
        self.scenario = scenario
        self.random = scenario.random
        self.make_planner = make_planner
        self.machine = Machine(self.program)
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self._gathered: dict[int, list[Report]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._waiters: dict[object, list[Thread]] = {}
        self._planner: Planner | None = None
        self._asked_at = 0.0
        self._todo = list(scenario.requests)
        self.ranks = [
            Rank(index, self, self.random, scenario.speeds[index])
            for index in range(self.program.world_size)
        ]

    def run(self) -> list[Outcome]:
        """Run everything to its end and check it.

        Raises:
            BrokenCutError: something that must hold does not.
        """
        for rank, seconds in zip(self.ranks, self.scenario.start_seconds, strict=True):
            self.after(seconds, lambda rank=rank: self._start(rank))
        self._plan_request()
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self._check_end()
        return self.outcomes

    # -- time -------------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action))

    def sleep(self, thread: Thread, seconds: float) -> None:
        """Let a thread go on after some time, unless it is interrupted."""
        thread.token += 1
        thread.status = SLEEPS
        thread.wakes_at = self.now + seconds
        token = thread.token
        self.after(seconds, lambda: self._wake_up(thread, token))

    def _wake_up(self, thread: Thread, token: int) -> None:
        if token == thread.token and thread.status == SLEEPS:
            self.resume(thread)

    def wait(self, line: object, thread: Thread) -> None:
        """Let a thread be woken when something happens on `line`."""
        self._waiters.setdefault(line, []).append(thread)

    def wake(self, line: object) -> None:
        """Let those that wait for `line` look again."""
        for thread in self._waiters.pop(line, ()):
            if thread.status == BLOCKED or thread.status == PARKED:
                token = thread.token
                self.after(0.0, lambda thread=thread, token=token: self._look_again(thread, token))

    def _look_again(self, thread: Thread, token: int) -> None:
        if token == thread.token and thread.status in (BLOCKED, PARKED):
            self.resume(thread)

    def resume(self, thread: Thread) -> None:
        """Run a thread until it sleeps or has to wait."""
        rank = thread.rank
        if rank.is_frozen and thread.needs_python:
            if thread.status != PARKED:
                thread.stalled = True
                thread.status = BLOCKED
                thread.token += 1
            return
        thread.token += 1
        step = next(thread.life, DONE)
        if type(step) is float:
            self.sleep(thread, step)
        else:
            thread.status = step
        rank.interrupt()
        rank.speak()

    def _start(self, rank: Rank) -> None:
        rank.is_started = True
        for thread in rank.threads:
            self.sleep(thread, self.random.random() * 0.001)
        rank.speak()

    # -- messages ---------------------------------------------------------------------------

    def _delay(self) -> float:
        slow = 20.0 if self.random.random() < 0.02 else 1.0
        return self.random.random() * self.scenario.delay_seconds * slow

    def send_report(self, report: Report) -> None:
        """Bring a report to the planner."""
        size = self.scenario.node_size
        if size is None:
            self.after(self._delay(), lambda: self._on_reports([report]))
            return
        node = report.rank // size
        gathered = self._gathered.setdefault(node, [])
        gathered.append(report)
        if len(gathered) == 1:
            self.after(GATHER_SECONDS, lambda: self._send_node_reports(node))

    def _send_node_reports(self, node: int) -> None:
        message = pack_reports(self._gathered.pop(node))
        self.after(self._delay(), lambda: self._on_reports(unpack_reports(message)))

    def _send_orders(self, orders: Orders) -> None:
        for _, order in orders:
            self._check_order(order)
        size = self.scenario.node_size
        if size is None:
            for index, order in orders:
                self.after(
                    self._delay(), lambda index=index, order=order: self._on_order(index, order)
                )
            return
        for node_orders in split_orders(orders, lambda index: index // size).values():
            message = pack_orders(node_orders)
            self.after(self._delay(), lambda message=message: self._on_node_orders(message))

    def _on_node_orders(self, message: dict[str, object]) -> None:
        for index, order in unpack_orders(message):
            self._on_order(index, order)

    def _on_order(self, index: int, order: Order) -> None:
        self.ranks[index].take(order)

    def _on_reports(self, reports: list[Report]) -> None:
        planner = self._planner
        if planner is not None:
            self._send_orders(planner.reports(reports, self.now))
            self._look_at_verdict(planner)

    # -- requests ---------------------------------------------------------------------------

    def _plan_request(self) -> None:
        if self._todo:
            request = self._todo.pop(0)
            self.after(request.pause_seconds, lambda: self._ask(request))

    def _ask(self, request: Request) -> None:
        number = len(self.outcomes) + 1
        planner = self._planner = self.make_planner(self.program.world_size, number, OPTIONS)
        self._asked_at = self.now
        self._send_orders(planner.start(self.now))
        self.after(TICK_SECONDS, lambda: self._tick(planner))
        if request.withdraw_after_seconds is not None:
            self.after(request.withdraw_after_seconds, lambda: self._withdraw(planner))

    def _withdraw(self, planner: Planner) -> None:
        if planner is self._planner:
            self._send_orders(planner.withdraw("by its user", self.now))
            self._look_at_verdict(planner)

    def _tick(self, planner: Planner) -> None:
        if planner is self._planner:
            self._send_orders(planner.tick(self.now))
            self._look_at_verdict(planner)
            self.after(TICK_SECONDS, lambda: self._tick(planner))

    def _look_at_verdict(self, planner: Planner) -> None:
        if isinstance(planner.verdict, Pending):
            return
        self._planner = None
        verdict = planner.verdict
        self.outcomes.append(
            Outcome(
                verdict, self.now - self._asked_at, planner.level, planner.rounds, planner.nudges
            )
        )
        if isinstance(verdict, Stand):
            self._check_stand(verdict, planner)
            pause = LONGEST_LOOK_SECONDS + self.random.random() * 0.05
            self.after(pause, lambda: self._end_stand(planner, verdict))
        else:
            self._check_withdrawal(verdict)
            self._plan_request()

    def _end_stand(self, planner: Planner, stand: Stand) -> None:
        """Nobody has moved since; let all go on."""
        for rank, counters in zip(self.ranks, stand.counters, strict=True):
            if rank.counters != counters:
                raise BrokenCutError(f"rank {rank.index} has moved during the stand")
            if rank.whereabouts()[0] is not State.PARKED:
                raise BrokenCutError(f"rank {rank.index} is {rank.whereabouts()[0]} in the stand")
        for (key, index), issued in self.machine.issued.items():
            if stand.counters[index].get(key, 0) != issued:
                raise BrokenCutError(f"rank {index} has issued {issued} on {key}, not as counted")
        self._send_orders(planner.release())
        self._plan_request()

    # -- what must hold ---------------------------------------------------------------------

    def _check_order(self, order: Order) -> None:
        """No target lies beyond what somebody has issued or stands before."""
        if self.program.has_uncounted or self.program.has_any_source:
            return
        for key, target in order.targets.items():
            ends = (key, key.partner) if isinstance(key, Channel) else (key,)
            if target > max(self._reach(end) for end in ends):
                raise BrokenCutError(f"target {target} of {key} is beyond what anybody has come to")

    def _reach(self, key: Key) -> int:
        reach = 0
        for index in members(key, self.program.groups):
            rank = self.ranks[index]
            is_held = any(thread.key == key for thread in rank.threads)
            reach = max(reach, rank.counters.get(key, 0) + is_held)
        return reach

    def _check_stand(self, stand: Stand, planner: Planner) -> None:
        if not is_cut(stand.counters, self.program.groups):
            raise BrokenCutError("counters do not agree at the stand")
        for rank in self.ranks:
            if rank.whereabouts()[0] is not State.PARKED:
                raise BrokenCutError(f"rank {rank.index} is {rank.whereabouts()[0]} at the stand")
        if planner.nudges and not self.program.has_uncounted:
            raise BrokenCutError("everybody was let on although all waits are counted")
        low, high = self._first_cuts()
        if low is None:
            return
        for index, counters in enumerate(stand.counters):
            least = low[index]
            # What was counted and then held is let through later: never more than one operation
            # for each time, but that is not known here.
            most = None if high is None or self.scenario.counts_under_orders else high[index]
            for key in counters.keys() | least.keys():
                count = counters.get(key, 0)
                if count < least.get(key, 0) or (most is not None and count > most.get(key, 0)):
                    raise BrokenCutError(f"rank {index} stands at {count} on {key}: not the first")

    def _check_withdrawal(self, withdrawn: Withdrawn) -> None:
        program = self.program
        if "no stand within" in withdrawn.reason:
            if not program.has_uncounted:
                raise BrokenCutError(withdrawn.reason)
        elif "ended" in withdrawn.reason:
            if not any(rank.whereabouts()[0] is State.ENDED for rank in self.ranks):
                raise BrokenCutError(withdrawn.reason)
            self._check_end_was_near()
        elif withdrawn.reason != "by its user":
            raise BrokenCutError(withdrawn.reason)

    def _check_end_was_near(self) -> None:
        """A rank may only have ended if it had nothing left that could be held."""
        if not self._is_comparable():
            return
        _, high = self._first_cuts()
        if high is None or self.scenario.counts_under_orders:
            return
        for index, codes in enumerate(self.program.threads):
            if high[index] == total_counters(codes[0], index):
                return
        raise BrokenCutError("a rank has ended that should have been held")

    def _is_comparable(self) -> bool:
        program = self.program
        return not (
            program.has_uncounted
            or program.has_any_source
            or program.has_threads
            or program.has_steps
        )

    def _first_cuts(self):
        """The first cut from where gates began to hold: at least, and at most."""
        if not self._is_comparable() or any(rank.base is None for rank in self.ranks):
            return None, None
        low, high = zip(*(rank.base for rank in self.ranks), strict=True)
        return first_cut(self.program, low), first_cut(self.program, high)

    def _check_end(self) -> None:
        """Every request has ended, every thread too, with the results of an undisturbed run."""
        if self._planner is not None or self._todo:
            raise BrokenCutError("a request has not ended")
        for rank in self.ranks:
            for number, thread in enumerate(rank.threads):
                if thread.status != DONE:
                    raise BrokenCutError(f"rank {rank.index} thread {number} hangs")
        results = [[thread.abacus.state for thread in rank.threads] for rank in self.ranks]
        if results != run_alone(self.program):
            raise BrokenCutError("results differ from an undisturbed run")
