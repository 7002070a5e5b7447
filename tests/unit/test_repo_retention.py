"""Retention rules: what is kept, for any list of snapshots."""

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.repo import JobName, Summary
from torchmig.repo.retention import KeepRules, decide

START = datetime(2024, 2, 28, 22, 30, tzinfo=UTC)


def summary(number, minutes, job="a", tags=()):
    created = (START + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return Summary(f"{number:064x}", JobName(job), "checkpoint", created, [], 1, 0, list(tags))


snapshots = st.lists(
    st.tuples(st.integers(0, 3 * 365 * 24 * 60), st.sampled_from("ab"), st.sets(st.just("t"))),
    max_size=40,
).map(lambda rows: [summary(n, m, job, tags) for n, (m, job, tags) in enumerate(rows)])
counts = st.integers(0, 6)
rules = st.builds(
    KeepRules,
    last=counts,
    hourly=counts,
    daily=counts,
    weekly=counts,
    monthly=counts,
    yearly=counts,
    within_seconds=st.none() | st.floats(1, 1e7),
    tags=st.just(()) | st.just(("t",)),
)


def kept(summaries, chosen):
    return {d.summary.id for d in decide(summaries, chosen) if d.is_kept}


@given(snapshots, rules)
@settings(deadline=None)
def test_properties_of_all_rules(summaries, chosen):
    decisions = decide(summaries, chosen)
    assert [d.summary for d in decisions] == summaries
    keeping = kept(summaries, chosen)
    for job in "ab":
        mine = sorted((s for s in summaries if s.job.name == job), key=lambda s: (s.created, s.id))
        # Whatever counts at all keeps the newest of each job, and jobs do not matter to each other.
        if mine and KeepRules(tags=chosen.tags) != chosen:
            assert mine[-1].id in keeping
        assert kept(mine, chosen) == keeping & {s.id for s in mine}
    # Forgetting twice forgets nothing more.
    left = [s for s in summaries if s.id in keeping]
    assert kept(left, chosen) == keeping


@given(snapshots, rules, rules)
@settings(deadline=None)
def test_rules_add_up(summaries, one, other):
    both = KeepRules(one.last, other.hourly, one.daily, other.weekly)
    alone = [
        KeepRules(last=one.last),
        KeepRules(hourly=other.hourly),
        KeepRules(daily=one.daily),
        KeepRules(weekly=other.weekly),
    ]
    assert kept(summaries, both) == set().union(*(kept(summaries, each) for each in alone))


@given(snapshots, st.integers(1, 6))
@settings(deadline=None)
def test_daily_keeps_the_newest_of_the_last_days(summaries, count):
    mine = [s for s in summaries if s.job.name == "a"]
    newest = {}
    for each in sorted(mine, key=lambda s: (s.created, s.id)):
        newest[each.created[:10]] = each.id
    expected = {newest[day] for day in sorted(newest)[-count:]}
    assert kept(mine, KeepRules(daily=count)) == expected


def test_examples():
    rows = [summary(n, minutes) for n, minutes in enumerate([0, 10, 80, 100, 1500, 1510, 40_000])]

    def numbers(**options):
        return sorted(int(i, 16) for i in kept(rows, KeepRules(**options)))

    assert numbers() == []
    assert numbers(last=2) == [5, 6]
    assert numbers(hourly=3) == [3, 5, 6]
    assert numbers(daily=2) == [5, 6]
    assert numbers(daily=9) == [2, 5, 6]
    assert numbers(yearly=3) == [6]
    assert numbers(within_seconds=60 * (40_000 - 1505)) == [5, 6]
    assert numbers(last=1, daily=2) == [5, 6]
    assert KeepRules().keeps_nothing
    assert not KeepRules(last=1).keeps_nothing


def test_reasons_are_told():
    (decision,) = decide([summary(1, 0, tags=["gold"])], KeepRules(last=1, daily=1, tags=("gold",)))
    assert decision.reasons == ("last", "daily", "tag gold")


def test_order_of_the_list_does_not_matter():
    rows = [summary(n, n * 37) for n in range(30)]
    chosen = KeepRules(last=2, hourly=3, daily=2)
    assert kept(rows, chosen) == kept(rows[::-1], chosen)
