"""A simulated rank: threads that run a program, gates that count and hold, reports.

The rule is the one of `torchmig.cut`, counts first included: between counting an operation and
looking at the order, a thread may be interrupted by anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

from cutsim.machine import Abacus, Machine, line_of, mix, wake_lines
from cutsim.programs import Await, Coalesced, Create, Instruction, Post, Raise, Step, Wait, Work
from torchmig.cut import Key, Level, Order, Place, Report, State, holds, parks

if TYPE_CHECKING:
    from cutsim.simulator import Simulation

REPORT_INTERVAL_SECONDS = 0.003
POLL_SECONDS = 0.02
LONGEST_LOOK_SECONDS = 0.004  # from counting an operation to looking at the order

# What a thread yields to: seconds to sleep, or one of these.
SLEEPS, HELD, PARKED, BLOCKED, DONE = range(5)


class Thread:
    """One thread: its program as a generator, and what it is waiting for."""

    __slots__ = (
        "abacus",
        "code",
        "interrupted",
        "is_main",
        "key",
        "life",
        "needs_python",
        "place",
        "rank",
        "remaining",
        "stalled",
        "status",
        "token",
        "wakes_at",
    )

    def __init__(self, rank: Rank, index: int, code: list[Instruction]) -> None:
        self.rank = rank
        self.code = code
        self.is_main = index == 0
        self.abacus = Abacus(rank.index, index)
        self.status = BLOCKED
        self.place = Place.NOWHERE
        self.key: Key | None = None
        self.needs_python = True  # must have the interpreter to go on
        self.interrupted = False  # parked at a safe point in the middle of a sleep or a poll
        self.remaining = 0.0
        self.stalled = False  # could go on but for the interpreter
        self.token = 0
        self.wakes_at = 0.0
        self.life = rank.live(self)


class Rank:
    """One rank under orders."""

    def __init__(self, index: int, simulation: Simulation, random: Random, speed: float) -> None:
        self.index = index
        self.simulation = simulation
        self.machine: Machine = simulation.machine
        self.random = random
        self.speed = speed
        self.counters: dict[Key, int] = {}
        self.order = Order(0, 0, Level.FREE)
        self.is_started = False
        self.sections = 0
        self.steps = 0
        self.sequence = 0
        self.is_frozen = False
        self.is_dirty = False  # counters have changed since the last report
        self.has_timer = False
        self.reported: tuple[object, ...] = ()
        self.looking: list[Key] = []  # counted, but the order not looked at yet
        # Counters when gates began to hold: what was issued, and with what was just counted.
        self.base: tuple[dict[Key, int], dict[Key, int]] | None = None
        self.threads = [
            Thread(self, number, code)
            for number, code in enumerate(simulation.program.threads[index])
        ]

    # -- the program ------------------------------------------------------------------------

    def live(self, thread: Thread) -> Iterator[object]:
        """Run the thread's code; yields seconds, or a status other than SLEEPS to stop in it."""
        machine, abacus, random = self.machine, thread.abacus, self.random
        for item in thread.code:
            if thread.is_main:
                yield from self._safe_point(thread)
            kind = type(item)
            if kind is Post:
                yield from self._gate(thread, item.key)
                self._issue(thread, item)
            elif kind is Wait:
                key, number = abacus.handles[item.handle]
                yield from self._complete(thread, key, number)
                abacus.state = mix(abacus.state, machine.result(key, number))
            elif kind is Work:
                thread.needs_python = item.in_python
                yield item.seconds * self.speed
                thread.needs_python = True
            elif kind is Step:
                self.steps += 1
                while parks(self.order, self.counters, Place.BOUNDARY):
                    thread.place = Place.BOUNDARY
                    yield PARKED
            elif kind is Coalesced:
                yield from self._gate(thread, item.block, is_section=True)
                self.sections += 1
                for post in item.posts:
                    yield 0.02 * random.random() if random.random() < 0.3 else 0.0001
                    self._count(post.key)
                    self._issue(thread, post)
                self.sections -= 1
            elif kind is Create:
                yield from self._create(thread, item)
            elif kind is Raise:
                machine.flags.add(item.flag)
                self.simulation.wake(("flag", item.flag))
            elif kind is Await:
                yield from self._await(thread, item)
            # The interpreter may be taken away here, whatever the thread was doing.
            yield random.random() * 0.002 * self.speed

    def _safe_point(self, thread: Thread) -> Iterator[object]:
        while parks(self.order, self.counters, Place.PYTHON):
            thread.place = Place.PYTHON
            yield PARKED

    def _count(self, key: Key, by: int = 1) -> None:
        count = self.counters.get(key, 0) + by
        if count:
            self.counters[key] = count
        else:
            del self.counters[key]
        self.is_dirty = True

    def _gate(self, thread: Thread, key: Key, is_section: bool = False) -> Iterator[object]:
        """Count, then look; if held, take back the count until let through."""
        self._count(key)
        is_hasty = self.simulation.scenario.counts_under_orders or self.order.level is Level.FREE
        if is_hasty and not is_section and self.random.random() < 0.25:
            thread.needs_python = False
            self.looking.append(key)
            yield self.random.random() * LONGEST_LOOK_SECONDS
            self.looking.remove(key)
            thread.needs_python = True
        order = self.order
        if order.level < Level.GATE or self.counters[key] <= order.targets.get(key, 0):
            return
        self._count(key, -1)
        while holds(self.order, self.counters, key):
            thread.key = key
            yield HELD
        thread.key = None
        self._count(key)

    def _issue(self, thread: Thread, post: Post) -> None:
        number = self.machine.post(self.index, post.key, thread.abacus.state)
        thread.abacus.handles[post.handle] = (post.key, number)
        for line in wake_lines(post.key):
            self.simulation.wake(line)

    def _complete(self, thread: Thread, key: Key, number: int) -> Iterator[object]:
        while not self.machine.is_complete(key, number):
            self.simulation.wait(line_of(key), thread)
            yield BLOCKED

    def _create(self, thread: Thread, item: Create) -> Iterator[object]:
        yield from self._gate(thread, item.key, is_section=True)
        self.sections += 1
        for key in (item.key, item.barrier):
            if key is None:
                continue
            if key is item.barrier:
                self._count(key)
            number = self.machine.post(self.index, key, thread.abacus.state)
            self.simulation.wake(line_of(key))
            yield from self._complete(thread, key, number)
            thread.abacus.handles[-1] = (key, number)
            thread.abacus.state = mix(thread.abacus.state, self.machine.result(key, number))
        self.sections -= 1

    def _await(self, thread: Thread, item: Await) -> Iterator[object]:
        """Wait in the store, where that counts as parked, in native code, or by polling."""
        while item.flag not in self.machine.flags or (item.how == "store" and self.order.final):
            self.simulation.wait(("flag", item.flag), thread)
            if item.how == "store":
                # Looked at again with every order; that a rank is parked its main thread decides.
                thread.place = Place.STORE
                yield PARKED
            elif item.how == "python":
                yield POLL_SECONDS
            else:
                yield BLOCKED

    # -- orders and reports -----------------------------------------------------------------

    def take(self, order: Order) -> None:
        """Take an order, unless it is older than the one that is active, and answer it."""
        if (order.request, order.serial) < (self.order.request, self.order.serial):
            return
        if order.request != self.order.request:
            self.base = None
        self.order = order
        self.is_frozen = False
        if order.level >= Level.GATE and self.base is None:
            issued = dict(self.counters)
            for key in self.looking:
                issued[key] -= 1
            self.base = issued, dict(self.counters)
        if self.simulation.scenario.wakes_late and self.random.random() < 0.5:
            self.say()  # nobody that the order lets go is awake yet
            self.simulation.after(LONGEST_LOOK_SECONDS * self.random.random(), self._wake_late)
        else:
            self.reconsider()
            self.say()

    def _wake_late(self) -> None:
        self.reconsider()
        self.speak()

    def reconsider(self) -> None:
        """Let go whoever need not stand any longer; stop the main thread where it may stand."""
        for thread in self.threads:
            if thread.status == HELD:
                if thread.key is not None and not holds(self.order, self.counters, thread.key):
                    self.simulation.resume(thread)
            elif thread.status == PARKED:
                self._reconsider_parked(thread)
            elif thread.stalled and not self.is_frozen:
                thread.stalled = False
                self.simulation.resume(thread)
        self.interrupt()

    def _reconsider_parked(self, thread: Thread) -> None:
        if thread.place is Place.STORE:
            self.simulation.resume(thread)
        elif not parks(self.order, self.counters, thread.place):
            if thread.interrupted:
                thread.interrupted = False
                self.simulation.sleep(thread, thread.remaining)
            else:
                self.simulation.resume(thread)

    def interrupt(self) -> None:
        """Park the main thread in the middle of Python work, if it may."""
        thread = self.threads[0]
        if self.order.level is not Level.ANY or self.sections:
            return
        sleeps = self.is_started and thread.status == SLEEPS and thread.needs_python
        if sleeps and parks(self.order, self.counters, Place.PYTHON):
            thread.token += 1
            thread.remaining = max(0.0, thread.wakes_at - self.simulation.now)
            thread.interrupted = True
            thread.status = PARKED
            thread.place = Place.PYTHON

    def whereabouts(self) -> tuple[State, Place, tuple[Key, ...]]:
        """Return state, place and the keys that threads are held at."""
        if not self.is_started:
            return State.NOT_READY, Place.NOWHERE, ()
        if all(thread.status == DONE for thread in self.threads):
            return State.ENDED, Place.NOWHERE, ()
        waiting = tuple(
            dict.fromkeys(
                thread.key
                for thread in self.threads
                if thread.status == HELD
                and thread.key is not None
                and holds(self.order, self.counters, thread.key)
            )
        )
        if self.sections:
            return State.BUSY, Place.NOWHERE, waiting
        main = self.threads[0]
        # A thread that has not woken yet to an order which lets it go stands no more.
        if main.status == PARKED and (
            main.place is Place.STORE or parks(self.order, self.counters, main.place)
        ):
            return State.PARKED, main.place, waiting
        if waiting:
            return State.PARKED, Place.GATE, waiting
        return State.RUNNING, Place.NOWHERE, ()

    def speak(self) -> None:
        """Report at once what has changed in place, and soon what has changed in counters."""
        if self.order.level is Level.FREE:
            return
        if self.whereabouts() != self.reported:
            self.say()
        elif self.is_dirty and not self.has_timer:
            self.has_timer = True
            self.simulation.after(REPORT_INTERVAL_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self.has_timer = False
        if self.is_dirty and self.order.level > Level.FREE:
            self.say()

    def say(self) -> None:
        """Send a report."""
        state, place, waiting = self.reported = self.whereabouts()
        self.sequence += 1
        self.is_dirty = False
        if self.order.final and state is State.PARKED:
            self.is_frozen = True
        self.simulation.send_report(
            Report(
                rank=self.index,
                request=self.order.request,
                serial=self.order.serial,
                sequence=self.sequence,
                state=state,
                place=place,
                waiting=waiting,
                counters=dict(self.counters),
                groups=self.machine.groups,
                steps=self.steps,
            )
        )
