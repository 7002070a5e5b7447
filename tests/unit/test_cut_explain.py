"""What people read about a request that is not through yet."""

from torchmig.cut import (
    Block,
    Channel,
    Collective,
    Direction,
    Place,
    RankView,
    Report,
    State,
    blame,
    describe_key,
    explain,
)

WORLD = Collective("world")


def view(rank, state, *, since=0.0, lacks=None, **more):
    report = Report(rank, 1, 1, 1, state, **more)
    return RankView(rank, report, since, lacks or {}, {})


def test_equal_ranks_share_a_line_and_the_slow_one_comes_first():
    held = {"place": Place.GATE, "waiting": (WORLD,), "counters": {WORLD: 4}}
    views = [view(rank, State.PARKED, since=8.0, **held) for rank in range(10)]
    views.append(view(10, State.RUNNING, lacks={WORLD: 4}, stack="train.py:12 in step\nloss.py:3"))
    assert explain(views, 10.0).splitlines() == [
        "rank 10: running for 10.0 s and must still come to number 4 of a collective of group"
        " 'world' (at 0)",
        "    train.py:12 in step",
        "    loss.py:3",
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: held before a collective of group 'world'"
        " (number 5) for 2.0 s",
    ]


def test_blame_names_who_has_not_answered_before_anybody_else():
    silent = RankView(3, None, 1.0, {}, {})
    assert blame([view(0, State.RUNNING), silent], 4.0) == "rank 3 has not answered for 3.0 s"


def test_blame_reads_well_for_every_state():
    assert blame([view(1, State.NOT_READY)], 1.0) == "rank 1 has not loaded torch yet for 1.0 s"
    assert blame([view(1, State.RUNNING)], 1.0) == "rank 1 is running for 1.0 s"
    assert (
        blame([view(1, State.PARKED, place=Place.STORE, lacks={WORLD: 2})], 1.0)
        == "rank 1 is waiting for a key in the store for 1.0 s and must still come to number 2 of"
        " a collective of group 'world' (at 0)"
    )
    assert blame([view(0, State.RUNNING), view(1, State.RUNNING)], 1.0).endswith(
        "and 1 more like it"
    )


def test_keys_are_described_by_what_is_done():
    assert describe_key(Block("pp", 0)) == "a coalesced block on group 'pp'"
    send = Channel("pp", 0, 2, 0, Direction.SEND)
    assert describe_key(send) == "a send to rank 2 on group 'pp'"
    assert describe_key(Channel("pp", -1, 2, 9, Direction.RECV)) == (
        "a receive from any rank with tag 9 on group 'pp'"
    )
