"""Reports in, orders out: brings all ranks of a job to a standstill at one cut.

Invariant: an order never names a target beyond what some rank has issued, or is about to issue and
    must issue before it can reach something that another has issued. So a target only ever follows
    the job's own order of operations, and whatever the planner lets a rank issue belongs to every
    cut that can still be reached. The cut that it comes to is the first one.

Why it ends: between two decisions either all ranks stand and agree (done), or a rank that lacks
something runs, or it is held and its next operation becomes a target. Each of the last two moves a
rank forward within the first reachable cut, and that cut is finite if the job drains its messages
now and then. A job that waits for something that is not counted (a file, a key in the store, a
pipe) shows as a standstill without agreement; then everybody is let on by one operation after some
patience. A deadline ends everything else.

Time is an argument everywhere; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchmig.cut.explain import RankView, blame, explain
from torchmig.cut.keys import Key
from torchmig.cut.ledger import GroupMismatchError, Ledger
from torchmig.cut.messages import Level, Order, Place, Report, State

Orders = list[tuple[int, Order]]

SECONDS_BETWEEN_LOOKS_PER_RANK = 1e-5


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How long to hope for a good place before taking any, and when to give up."""

    deadline_seconds: float = 300.0
    min_patience_seconds: float = 2.0
    patience_steps: float = 3.0  # of the slowest rank's step time
    patience_boundaries: int = 3  # step boundaries that every rank passes without a stand
    resend_seconds: float = 5.0  # an order that is not answered for so long is sent again


@dataclass(frozen=True, slots=True)
class Pending:
    """No end yet."""


@dataclass(frozen=True, slots=True)
class Stand:
    """All ranks are parked at one cut and have confirmed it."""

    counters: tuple[dict[Key, int], ...]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request is off and every rank has been told to go on."""

    reason: str


Verdict = Pending | Stand | Withdrawn


@dataclass(slots=True)
class _Rank:
    """What the planner knows of one rank beside its counters."""

    order: Order | None = None
    report: Report | None = None
    since: float = 0.0
    asked_at: float = 0.0
    first_steps: int = 0
    loose_until: float | None = None  # let go although it stood: see `_nudge`

    @property
    def answered(self) -> bool:
        """What it says is not about an order that has been replaced meanwhile."""
        return (
            self.report is not None
            and self.order is not None
            and self.report.serial == self.order.serial
        )


class Planner:
    """One request to bring a job to a stand.

    Call `start` once, `report` or `reports` with what ranks say and `tick` a few times a second;
    send what they return. Look at `verdict` after each. After a stand, `release` lets everybody go
    on.
    """

    def __init__(
        self, world_size: int, request: int, options: PlannerOptions | None = None
    ) -> None:
        self.world_size = world_size
        self.request = request
        self.options = options or PlannerOptions()
        self.verdict: Verdict = Pending()
        self.level = Level.STEP
        self.rounds = 0  # decisions that led to orders
        self.orders_sent = 0
        self.nudges = 0  # standstills that no counter explained
        self._ranks = [_Rank() for _ in range(world_size)]
        self._ledger = Ledger(world_size)
        self._unheard = set(range(world_size))
        self._ended: list[int] = []
        self._judged = False
        self._standing: set[int] = set()
        self._held: dict[int, tuple[Key, ...]] = {}
        self._final = False
        self._spoilt = False  # somebody's counters are no longer those of the final orders
        self._serial = 0
        self._started_at = 0.0
        self._level_since = 0.0
        self._news_at = 0.0
        self._looked_at = 0.0

    def start(self, now: float) -> Orders:
        """Return the first orders: stop at the next step boundary."""
        self._started_at = self._level_since = self._news_at = self._looked_at = now
        for rank in self._ranks:
            rank.since = now
        return self._send(range(self.world_size), now)

    def report(self, report: Report, now: float) -> Orders:
        """Take one rank's report and return the orders that follow."""
        return self.reports((report,), now)

    def reports(self, reports: Iterable[Report], now: float) -> Orders:
        """Take reports that came in together and return the orders that follow."""
        if not isinstance(self.verdict, Pending):
            return []
        for report in reports:
            try:
                self._take(report, now)
            except GroupMismatchError as error:
                return self.withdraw(str(error), now)
        if self._ended:
            return self.withdraw(_ending(self._ended, self.world_size), now)
        return self._decide(now)

    def tick(self, now: float) -> Orders:
        """Let time pass: lose patience, send unanswered orders again, give up at the deadline."""
        if not isinstance(self.verdict, Pending):
            return []
        if now - self._started_at >= self.options.deadline_seconds:
            seconds = f"{self.options.deadline_seconds:g} s"
            return self.withdraw(f"no stand within {seconds}: {blame(self.view(), now)}", now)
        # These look at every rank; in a large job not each time.
        if now - self._looked_at < self.world_size * SECONDS_BETWEEN_LOOKS_PER_RANK:
            return self._decide(now)
        self._looked_at = now
        orders = self._resend(now)
        self._tighten(now)
        if self._impatient(now):
            if self.level < Level.ANY:
                self._raise_level(self._next_level(), now)
            else:
                self._nudge(now)
        return orders + self._decide(now)

    def release(self) -> Orders:
        """Return the orders that let everybody go on after a stand."""
        return self._free()

    def withdraw(self, reason: str, now: float) -> Orders:
        """Call the request off; a verdict that is already there stays."""
        if not isinstance(self.verdict, Pending):
            return []
        self.verdict = Withdrawn(reason)
        return self._free()

    def view(self) -> list[RankView]:
        """Return who is where, for people."""
        return [
            RankView(
                rank=index,
                report=rank.report,
                since=rank.since,
                lacks=self._ledger.aims(index),
                members={
                    key: self._ledger.members(key)
                    for key in (*self._ledger.missing[index], *self._held.get(index, ()))
                },
                asked_at_step=rank.first_steps,
            )
            for index, rank in enumerate(self._ranks)
        ]

    def explain(self, now: float) -> str:
        """Return a text that says who waits where, for what, since when."""
        return explain(self.view(), now)

    def _take(self, report: Report, now: float) -> None:
        rank = self._ranks[report.rank]
        old = rank.report
        if report.request != self.request or (old and report.sequence <= old.sequence):
            return
        if old is None:
            self._unheard.discard(report.rank)
            rank.first_steps = report.steps
        if report.state is State.ENDED and report.rank not in self._ended:
            self._ended.append(report.rank)
        self._ledger.learn_groups(report.groups)
        news = self._ledger.count(report.rank, report.counters)
        self._spoilt = self._spoilt or news
        for key in report.waiting:
            self._ledger.expect(key)
        rank.report = report
        if news or old is None or _whereabouts(old) != _whereabouts(report):
            rank.since = self._news_at = now
        elif old.serial != report.serial:
            self._news_at = now
        self._place(report.rank)

    def _place(self, index: int) -> None:
        """Sort a rank into those that stand and those that are held at a gate."""
        rank = self._ranks[index]
        report = rank.report
        self._standing.discard(index)
        self._held.pop(index, None)
        if report is not None and rank.answered:
            if report.state is State.PARKED and rank.loose_until is None:
                self._standing.add(index)
            if report.waiting:  # also while another thread of the rank is busy
                self._held[index] = report.waiting
        self._ledger.changed.add(index)

    def _decide(self, now: float) -> Orders:
        """Bring targets up to date; return the orders of all for whom something changed."""
        ledger = self._ledger
        if not self._unheard and not self._judged:
            self._judged = True
            self._skip_vain_levels(now)
        touched: set[int] = set()
        while True:
            ledger.settle()
            ledger.serve(self._held)
            ledger.settle()
            if not ledger.changed:
                break
            changed, ledger.changed = ledger.changed, set()
            touched |= changed
            for index in changed:
                if ledger.missing[index]:
                    self._let_on(index)
        if self._final and (ledger.lacking or self._spoilt):
            # Somebody issued more than the stand allows: the other threads of a rank may do that
            # until its final order arrives. From here on gates hold, so it happens once. Even if
            # all did so equally: what was counted past a target may yet be held and taken back.
            self._final = False
            self.level = max(self.level, Level.GATE)
            touched.update(range(self.world_size))
        if ledger.lacking or len(self._standing) < self.world_size:
            return self._send(touched, now)
        if self._final:
            self.verdict = Stand(tuple(dict(counters) for counters in ledger.counters))
            return []
        self._final = True
        self._spoilt = False
        return self._send(range(self.world_size), now)

    def _let_on(self, index: int) -> None:
        """Make what the rank is held before a target: it must pass that to reach anything else."""
        for key in self._held.get(index, ()):
            self._ledger.lift(key, self._ledger.counters[index].get(key, 0) + 1)

    def _order(self, index: int) -> tuple[Level, dict[Key, int], bool]:
        if self._ranks[index].loose_until is not None:
            return Level.FREE, {}, False
        if self._final:
            return max(self.level, Level.GATE), dict(self._ledger.counters[index]), True
        return self.level, self._ledger.aims(index), False

    def _send(self, indexes: Iterable[int], now: float) -> Orders:
        """Return orders for those ranks whose standing order says something else than it should."""
        orders: Orders = []
        serial = self._serial + 1
        for index in sorted(indexes):
            rank = self._ranks[index]
            if rank.report is None and rank.order is not None:
                continue  # what it lacks is known once it has spoken
            level, targets, final = self._order(index)
            if rank.order is not None and (level, final) == (rank.order.level, rank.order.final):
                counters = self._ledger.counters[index]
                standing = {
                    key: target
                    for key, target in rank.order.targets.items()
                    if final or counters.get(key, 0) < target
                }
                if standing == targets:
                    continue
            rank.order = Order(self.request, serial, level, targets, final)
            rank.asked_at = now
            orders.append((index, rank.order))
            self._place(index)
        self._ledger.changed.clear()
        return self._count(orders, serial)

    def _count(self, orders: Orders, serial: int) -> Orders:
        if orders:
            self._serial = serial
            self.rounds += 1
            self.orders_sent += len(orders)
        return orders

    def _free(self) -> Orders:
        serial = self._serial + 1
        order = Order(self.request, serial, Level.FREE)
        return self._count([(index, order) for index in range(self.world_size)], serial)

    def _resend(self, now: float) -> Orders:
        """Repeat what has not been answered; a rank takes an order twice without harm."""
        orders: Orders = []
        for index, rank in enumerate(self._ranks):
            overdue = now - rank.asked_at >= self.options.resend_seconds
            if rank.order is not None and overdue and not rank.answered:
                rank.asked_at = now
                orders.append((index, rank.order))
        return orders

    def _skip_vain_levels(self, now: float) -> None:
        """Do not wait for step boundaries in a job that has shown none."""
        steps = any(rank.report.steps for rank in self._ranks if rank.report)
        if self.level is Level.STEP and not steps:
            self._raise_level(self._next_level(), now)

    def _next_level(self) -> Level:
        """Return what to hope for next; not for gates in a job that has shown no operation."""
        reports = (rank.report for rank in self._ranks if rank.report)
        if self.level is Level.STEP and any(r.counters or r.waiting for r in reports):
            return Level.GATE
        return Level.ANY

    def _raise_level(self, level: Level, now: float) -> None:
        self.level = level
        self._level_since = now
        self._final = False
        self._ledger.changed.update(range(self.world_size))

    def _impatient(self, now: float) -> bool:
        patience = self._patience_seconds()
        if self.level is Level.ANY:
            return now - max(self._news_at, self._level_since) >= patience
        if now - self._level_since >= patience:
            return True
        return self.level is Level.STEP and all(
            rank.report is not None
            and rank.report.steps - rank.first_steps >= self.options.patience_boundaries
            for rank in self._ranks
        )

    def _patience_seconds(self) -> float:
        step = max((rank.report.seconds_per_step for rank in self._ranks if rank.report), default=0)
        wanted = max(self.options.min_patience_seconds, self.options.patience_steps * step)
        return min(wanted, self.options.deadline_seconds / 4)

    def _nudge(self, now: float) -> None:
        """Let everybody on: somebody waits for what no counter shows.

        A held rank gets one operation more; one that stands elsewhere runs freely for a moment.
        """
        self.nudges += 1
        self._news_at = now
        self._final = False
        for index in self._standing - self._held.keys():
            self._ranks[index].loose_until = now + self._patience_seconds() / 4
            self._standing.discard(index)
        for index in self._held:
            self._let_on(index)
        self._ledger.changed.update(range(self.world_size))

    def _tighten(self, now: float) -> None:
        """Take back what `_nudge` let loose, when its time is over."""
        for index, rank in enumerate(self._ranks):
            if rank.loose_until is not None and now >= rank.loose_until:
                rank.loose_until = None
                self._place(index)


def _ending(ended: list[int], world_size: int) -> str:
    if len(ended) == world_size:
        return "all ranks have ended"
    if len(ended) == 1:
        return f"rank {ended[0]} has ended"
    return f"rank {ended[0]} and {len(ended) - 1} more have ended"


def _whereabouts(report: Report) -> tuple[State, Place, tuple[Key, ...]]:
    return report.state, report.place, report.waiting
