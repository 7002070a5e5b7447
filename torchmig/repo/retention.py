"""Which snapshots to keep: a pure function of the list and the rules.

For each rule "the last N hours, days, …" the newest snapshot of each of the last N periods that
have one is kept; a snapshot is kept if any rule keeps it. Each job is looked at for itself.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from torchmig.repo.manifest import parse_time
from torchmig.repo.repository import Summary


@dataclass(frozen=True, slots=True)
class KeepRules:
    """How many to keep by each rule; 0 and None keep nothing."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within_seconds: float | None = None  # back from the job's newest snapshot
    tags: tuple[str, ...] = ()

    @property
    def keeps_nothing(self) -> bool:
        """Tell whether no rule is set, which would forget everything."""
        return self == KeepRules()


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one snapshot; the reasons are the rules that keep it."""

    summary: Summary
    reasons: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """Tell whether some rule keeps it."""
        return bool(self.reasons)


_PERIODS: dict[str, Callable[[datetime], tuple[int, ...]]] = {
    "hourly": lambda time: (time.year, time.month, time.day, time.hour),
    "daily": lambda time: (time.year, time.month, time.day),
    "weekly": lambda time: time.isocalendar()[:2],
    "monthly": lambda time: (time.year, time.month),
    "yearly": lambda time: (time.year,),
}


def decide(summaries: Sequence[Summary], rules: KeepRules) -> list[Decision]:
    """Return a decision for each snapshot, in the order given."""
    by_job: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        by_job[summary.job.name].append(summary)
    reasons: dict[str, list[str]] = {summary.id: [] for summary in summaries}
    for members in by_job.values():
        members.sort(key=lambda summary: (summary.created, summary.id), reverse=True)
        for snapshot_id, reason in _kept(members, rules):
            reasons[snapshot_id].append(reason)
    return [Decision(summary, tuple(reasons[summary.id])) for summary in summaries]


def _kept(newest_first: list[Summary], rules: KeepRules) -> list[tuple[str, str]]:
    kept = [(summary.id, "last") for summary in newest_first[: rules.last]]
    for name, period_of in _PERIODS.items():
        seen: set[tuple[int, ...]] = set()
        for summary in newest_first:
            if len(seen) >= getattr(rules, name):
                break
            period = period_of(parse_time(summary.created))
            if period not in seen:
                seen.add(period)
                kept.append((summary.id, name))
    if rules.within_seconds is not None:
        # Counted back from the newest one, so that a job that rests keeps its snapshots.
        edge = parse_time(newest_first[0].created) - timedelta(seconds=rules.within_seconds)
        kept += [
            (summary.id, "within")
            for summary in newest_first
            if parse_time(summary.created) >= edge
        ]
    kept += [
        (summary.id, f"tag {tag}")
        for summary in newest_first
        for tag in rules.tags
        if tag in summary.tags
    ]
    return kept
