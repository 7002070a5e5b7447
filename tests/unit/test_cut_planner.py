"""The planner against reports written by hand: each test is one situation that a job gets into."""

from torchmig.cut import (
    ANY_SOURCE,
    Block,
    Channel,
    Collective,
    Direction,
    Level,
    Pending,
    Place,
    Planner,
    PlannerOptions,
    Report,
    Stand,
    State,
    Withdrawn,
)

WORLD = Collective("world")
LEFT = Collective("left")
RIGHT = Collective("right")


def send(source, destination, tag=0):
    return Channel("world", source, destination, tag, Direction.SEND)


def recv(source, destination, tag=0):
    return Channel("world", source, destination, tag, Direction.RECV)


class Job:
    """Ranks that say what a test lets them say, always with the serial of their last order."""

    GROUPS = {"world": (0, 1, 2), "left": (0, 1), "right": (1, 2)}  # noqa: RUF012

    def __init__(self, world_size=3, steps=1, **options):
        self.planner = Planner(world_size, 7, PlannerOptions(**options))
        self.steps = steps
        self.now = 100.0
        self.orders = {}
        self.sequence = 0
        self.groups = {
            name: tuple(rank for rank in members if rank < world_size)
            for name, members in self.GROUPS.items()
            if min(members) < world_size
        }
        self._take(self.planner.start(self.now))

    def _take(self, orders):
        for rank, order in orders:
            self.orders[rank] = order
        self.last = dict(orders)

    def say(self, rank, state, counters=None, place=Place.NOWHERE, waiting=(), **more):
        self.sequence += 1
        more.setdefault("serial", self.orders[rank].serial)
        more.setdefault("sequence", self.sequence)
        more.setdefault("groups", self.groups)
        more.setdefault("steps", self.steps)
        report = Report(
            rank=rank,
            request=7,
            state=state,
            place=place,
            waiting=waiting,
            counters=counters or {},
            **more,
        )
        self._take(self.planner.report(report, self.now))

    def runs(self, rank, counters=None, **more):
        self.say(rank, State.RUNNING, counters, **more)

    def held(self, rank, key, counters=None, **more):
        self.say(rank, State.PARKED, counters, Place.GATE, (key,), **more)

    def boundary(self, rank, counters=None, **more):
        self.say(rank, State.PARKED, counters, Place.BOUNDARY, **more)

    def pass_time(self, seconds):
        self.now += seconds
        self._take(self.planner.tick(self.now))

    def targets(self, rank):
        return dict(self.orders[rank].targets)

    @property
    def verdict(self):
        return self.planner.verdict


def test_boundaries_that_agree_become_a_stand_only_after_confirmation():
    job = Job(2)
    assert {order.level for order in job.orders.values()} == {Level.STEP}
    job.boundary(0, {WORLD: 4})
    assert job.last == {}
    job.boundary(1, {WORLD: 4})
    assert all(order.final and order.targets == {WORLD: 4} for order in job.last.values())
    assert job.verdict == Pending()
    job.boundary(0, {WORLD: 4})
    job.boundary(1, {WORLD: 4})
    assert job.verdict == Stand(({WORLD: 4}, {WORLD: 4}))
    assert {order.level for _, order in job.planner.release()} == {Level.FREE}


def test_rank_behind_the_others_is_told_how_far_to_go():
    job = Job(2)
    job.boundary(0, {WORLD: 4})
    job.runs(1, {WORLD: 6})
    assert job.last.keys() == {0}
    assert job.targets(0) == {WORLD: 6}
    job.boundary(1, {WORLD: 8})
    assert job.targets(0) == {WORLD: 8}
    job.boundary(0, {WORLD: 8})
    assert all(order.final for order in job.last.values())


def test_report_from_before_the_last_order_does_not_count_as_standing():
    job = Job(2)
    job.boundary(0, {WORLD: 4})
    old = job.orders[0].serial
    job.boundary(1, {WORLD: 5})
    job.boundary(0, {WORLD: 5}, serial=old)
    assert not job.orders[0].final
    job.boundary(0, {WORLD: 5})
    assert job.orders[0].final


def test_late_report_is_dropped():
    job = Job(2)
    job.boundary(0, {WORLD: 4}, sequence=50)
    job.boundary(0, {WORLD: 3}, sequence=49)
    job.boundary(1, {WORLD: 4})
    assert job.orders[0].final


def test_report_for_another_request_is_dropped():
    job = Job(1)
    report = Report(rank=0, request=6, serial=1, sequence=1, state=State.ENDED)
    assert job.planner.report(report, job.now) == []
    assert job.verdict == Pending()


def test_job_without_steps_is_held_at_gates_at_once():
    job = Job(2, steps=0)
    job.runs(0, {WORLD: 1})
    job.runs(1, {WORLD: 1})
    assert {order.level for order in job.orders.values()} == {Level.GATE}


def test_job_with_neither_steps_nor_operations_is_stopped_anywhere():
    job = Job(2, steps=0)
    job.runs(0)
    job.say(1, State.NOT_READY)
    assert {order.level for order in job.orders.values()} == {Level.ANY}


def test_patience_grows_with_the_step_time_and_ends():
    job = Job(1)
    job.runs(0, {WORLD: 1}, seconds_per_step=5.0)
    job.pass_time(14.0)
    assert job.orders[0].level is Level.STEP
    job.pass_time(2.0)
    assert job.orders[0].level is Level.GATE
    job.pass_time(16.0)
    assert job.orders[0].level is Level.ANY


def test_gates_are_not_waited_for_by_a_job_that_issues_nothing():
    """As one that trains in a CUDA graph after a few steps outside it."""
    job = Job(2)
    for rank in range(2):
        job.runs(rank, steps=4)
    job.pass_time(1.9)
    assert {order.level for order in job.orders.values()} == {Level.STEP}
    job.pass_time(0.2)
    assert {order.level for order in job.orders.values()} == {Level.ANY}


def test_boundaries_that_never_agree_end_the_patience():
    job = Job(2)
    for count in range(1, 5):
        job.runs(0, {send(0, 1): count}, steps=count)
        job.runs(1, {send(1, 0): count}, steps=count)
    job.pass_time(0.01)
    assert job.orders[0].level is Level.GATE


def at_gates(job):
    """Bring a job without steps to level GATE, every rank one operation in."""
    for rank in range(job.planner.world_size):
        job.runs(rank, {WORLD: 1})
    assert {order.level for order in job.orders.values()} == {Level.GATE}


def test_rank_held_before_another_group_is_let_through_when_it_is_waited_for():
    job = Job(steps=0)
    at_gates(job)
    # 2 has issued on right, for which 1 must pass left, for which 0 must come
    job.runs(2, {WORLD: 1, RIGHT: 1})
    assert job.targets(1) == {RIGHT: 1}
    job.held(1, LEFT, {WORLD: 1})
    assert job.targets(1) == {RIGHT: 1, LEFT: 1}
    assert job.targets(0) == {LEFT: 1}
    job.held(0, WORLD, {WORLD: 1, LEFT: 1})
    job.held(1, WORLD, {WORLD: 1, LEFT: 1, RIGHT: 1})
    job.held(2, WORLD, {WORLD: 1, RIGHT: 1})
    assert all(order.final for order in job.last.values())


def test_operation_counted_before_it_was_held_is_let_through_for_all():
    job = Job(2, steps=0)
    at_gates(job)
    job.runs(0, {WORLD: 2})  # counts first …
    assert job.targets(1) == {WORLD: 2}
    job.held(0, WORLD, {WORLD: 1})  # … and is held after all
    assert job.targets(0) == {WORLD: 2}
    job.held(0, WORLD, {WORLD: 2})
    job.held(1, WORLD, {WORLD: 2})
    assert job.orders[0].final


def test_counter_that_falls_to_nothing_is_seen():
    job = Job(2, steps=0)
    at_gates(job)
    job.runs(0, {WORLD: 1, LEFT: 1})
    job.held(0, LEFT, {WORLD: 1})
    assert job.targets(0) == {LEFT: 1}


def test_receiver_must_come_to_what_was_sent_and_sender_to_what_is_received():
    job = Job(2, steps=0)
    job.runs(0, {send(0, 1): 3})
    job.runs(1, {recv(0, 1): 1, recv(0, 1, tag=5): 2})
    assert job.targets(1) == {recv(0, 1): 3}
    assert job.targets(0) == {send(0, 1, tag=5): 2}


def test_block_of_unknown_content_is_opened_for_a_rank_that_lacks_something():
    job = Job(2, steps=0)
    job.runs(0, {send(0, 1): 1})
    block = Block("world", 1)
    job.held(1, block)
    job.held(1, block)
    assert job.targets(1) == {recv(0, 1): 1, block: 1}
    job.say(1, State.BUSY, {block: 1, recv(0, 1): 1})
    job.held(0, WORLD, {send(0, 1): 1})
    assert job.last == {}
    job.held(1, WORLD, {block: 1, recv(0, 1): 1})
    assert job.orders[0].final


def test_every_held_thread_of_a_rank_is_let_through():
    job = Job(steps=0)
    at_gates(job)
    job.runs(0, {WORLD: 2})
    for _ in range(2):
        job.say(1, State.PARKED, {WORLD: 1}, Place.GATE, (LEFT, RIGHT))
    assert job.targets(1) == {WORLD: 2, LEFT: 1, RIGHT: 1}


def test_any_source_takes_one_sender_that_is_ready():
    job = Job(steps=0)
    anywhere = recv(ANY_SOURCE, 0)
    job.runs(0, {anywhere: 1})
    job.held(1, send(1, 0), {})
    job.held(2, send(2, 0), {})
    for rank in (1, 2):
        job.held(rank, send(rank, 0), {})
    assert [job.targets(1), job.targets(2)].count({}) == 1
    sender = 1 if job.targets(1) else 2
    other = 3 - sender
    job.held(sender, WORLD, {send(sender, 0): 1})
    job.held(0, anywhere, {anywhere: 1})
    job.held(other, send(other, 0), {})
    assert job.orders[0].final


def test_any_source_lets_everybody_run_while_no_sender_is_ready():
    job = Job(steps=0)
    anywhere = recv(ANY_SOURCE, 0)
    job.runs(0, {anywhere: 1})
    for rank in (1, 2, 1, 2):
        job.held(rank, RIGHT)
    assert job.targets(1)[RIGHT] == 1
    assert job.targets(1)[send(1, 0)] == 1
    job.runs(1, {RIGHT: 1})
    job.held(2, WORLD, {RIGHT: 1, send(2, 0): 1})
    assert job.targets(1) == {}


def test_named_receives_and_any_source_on_one_port_are_compared_as_totals():
    job = Job(steps=0)
    anywhere = recv(ANY_SOURCE, 0)
    job.runs(0, {recv(1, 0): 1, anywhere: 2})
    job.runs(1, {send(1, 0): 2})
    job.runs(2, {send(2, 0): 2})
    assert job.targets(0) == {anywhere: 3}
    job.held(0, WORLD, {recv(1, 0): 1, anywhere: 3})
    job.held(1, WORLD, {send(1, 0): 2})
    job.held(2, WORLD, {send(2, 0): 2})
    assert job.orders[0].final


def test_stand_is_off_when_a_rank_passed_something_before_the_final_order():
    job = Job(2)
    job.boundary(0, {WORLD: 4})
    job.boundary(1, {WORLD: 4})
    job.boundary(0, {WORLD: 5})
    assert not any(order.final for order in job.orders.values())
    assert {order.level for order in job.orders.values()} == {Level.GATE}
    assert job.targets(1) == {WORLD: 5}
    for _ in range(2):
        job.boundary(0, {WORLD: 5})
        job.boundary(1, {WORLD: 5})
    assert isinstance(job.verdict, Stand)


def test_counters_that_changed_equally_are_confirmed_once_more():
    job = Job(2)
    job.boundary(0, {WORLD: 4})
    job.boundary(1, {WORLD: 4})
    job.say(0, State.PARKED, {WORLD: 5}, Place.BOUNDARY)  # 5 may be counted but not issued
    assert not job.orders[1].final
    job.boundary(1, {WORLD: 5})
    job.boundary(0, {WORLD: 5})
    assert job.verdict == Pending()
    assert job.orders[0].final
    assert job.orders[0].targets == {WORLD: 5}
    job.boundary(0, {WORLD: 5})
    job.boundary(1, {WORLD: 5})
    assert isinstance(job.verdict, Stand)


def test_thread_held_beside_a_busy_one_is_let_through():
    job = Job(steps=0)
    at_gates(job)
    job.runs(2, {WORLD: 1, RIGHT: 1})
    job.say(1, State.BUSY, {WORLD: 1}, waiting=(LEFT,))
    job.say(1, State.BUSY, {WORLD: 1}, waiting=(LEFT,))
    assert job.targets(1) == {RIGHT: 1, LEFT: 1}


def test_rank_that_runs_again_does_not_confirm_until_it_stands():
    job = Job(1)
    job.say(0, State.PARKED, place=Place.STORE)
    job.runs(0)
    assert job.verdict == Pending()
    job.boundary(0)
    assert isinstance(job.verdict, Stand)


def test_standstill_for_an_uncounted_reason_lets_everybody_on_a_little():
    job = Job(2, steps=0)
    at_gates(job)
    job.say(0, State.PARKED, {WORLD: 1, LEFT: 1}, Place.STORE)
    job.held(1, LEFT, {WORLD: 1})
    job.held(1, LEFT, {WORLD: 1, LEFT: 1})
    job.runs(0, {WORLD: 2, LEFT: 1})  # 1 lacks WORLD and is let through to it
    job.runs(1, {WORLD: 1, LEFT: 2})  # but waits for something else
    for _ in range(3):
        job.pass_time(2.1)
    assert job.orders[0].level is Level.ANY


def test_rank_parked_in_python_is_let_loose_for_a_moment_when_nothing_moves():
    job = Job(2, steps=0)
    job.runs(0)
    job.runs(1)
    job.say(0, State.PARKED, place=Place.PYTHON)
    job.runs(1)
    job.pass_time(2.1)
    assert job.last[0].level is Level.FREE
    assert 1 not in job.last
    job.say(0, State.PARKED, place=Place.PYTHON)  # not awake yet
    job.say(1, State.PARKED, place=Place.PYTHON)
    assert not any(order.final for order in job.orders.values())
    job.runs(0)
    job.runs(1)
    job.pass_time(0.6)
    assert job.last[0].level is Level.ANY


def test_deadline_withdraws_with_the_rank_to_blame():
    job = Job(2, steps=0, deadline_seconds=5.0)
    at_gates(job)
    job.held(0, WORLD, {WORLD: 2})
    job.pass_time(6.0)
    assert isinstance(job.verdict, Withdrawn)
    assert "within 5 s" in job.verdict.reason
    assert "rank 1 is running for 6.0 s" in job.verdict.reason
    assert "number 2 of a collective of group 'world' (at 1)" in job.verdict.reason
    assert {order.level for order in job.last.values()} == {Level.FREE}
    assert job.last.keys() == {0, 1}


def test_rank_that_ended_withdraws():
    job = Job(2)
    job.boundary(0)
    job.say(1, State.ENDED)
    assert job.verdict == Withdrawn("rank 1 has ended")
    assert {order.level for order in job.last.values()} == {Level.FREE}


def test_two_memberships_of_one_group_withdraw():
    job = Job(2)
    job.runs(0, groups={"world": (0, 1)})
    job.runs(1, groups={"world": (1,)})
    assert isinstance(job.verdict, Withdrawn)
    assert "'world'" in job.verdict.reason


def test_group_without_known_members_withdraws_by_name():
    job = Job(2)
    job.runs(0, groups={"unknown-0x1": ()})
    assert job.verdict == Withdrawn(
        "group 'unknown-0x1' was made outside torch.distributed: its members are not known"
    )


def test_counter_of_a_group_that_nobody_named_withdraws():
    job = Job(2)
    job.runs(0, {WORLD: 1}, groups={})
    assert isinstance(job.verdict, Withdrawn)


def test_unanswered_order_is_sent_again():
    job = Job(2)
    job.runs(0)
    job.pass_time(5.1)
    assert job.last[1] == job.orders[1]


def test_nothing_follows_after_the_verdict():
    job = Job(1, deadline_seconds=1.0)
    job.pass_time(2.0)
    job.boundary(0)
    assert job.last == {}
    assert job.planner.withdraw("again", job.now) == []
