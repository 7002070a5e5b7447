"""Who waits where, for what, since when: one text for the curious and for withdrawals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmig.cut.keys import ANY_SOURCE, Block, Channel, Direction, Key
from torchmig.cut.messages import Place, Report, State

_PLACES = {
    Place.BOUNDARY: "parked at a step boundary",
    Place.PYTHON: "parked between two lines of Python",
    Place.STORE: "waiting for a key in the store",
}
_STATES = {
    State.NOT_READY: "has not loaded torch yet",
    State.RUNNING: "running",
    State.BUSY: "inside a coalesced block or the creation of a group",
    State.ENDED: "ended",
}
_MAX_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class RankView:
    """What is known of one rank.

    Attributes:
        report: the last one; None if the rank has not answered yet.
        since: when the rank last moved.
        lacks: operations that the rank has still to issue before it may stand, with the counter it
            must come to.
        members: ranks of the keys in `lacks` and of those that the rank is held at.
        asked_at_step: optimizer steps that the rank had ended when it took its first order.
    """

    rank: int
    report: Report | None
    since: float
    lacks: Mapping[Key, int]
    members: Mapping[Key, tuple[int, ...]]
    asked_at_step: int = 0


def describe_key(key: Key) -> str:
    """Return words for what is issued on `key`."""
    if isinstance(key, Block):
        return f"a coalesced block on group {key.group!r}"
    if isinstance(key, Channel):
        tag = f" with tag {key.tag}" if key.tag else ""
        if key.direction is Direction.SEND:
            return f"a send to rank {key.destination}{tag} on group {key.group!r}"
        source = "any rank" if key.source == ANY_SOURCE else f"rank {key.source}"
        return f"a receive from {source}{tag} on group {key.group!r}"
    return f"a collective of group {key.group!r}"


def describe_rank(view: RankView, now: float) -> str:
    """Return one line: where the rank is, since when, and what it lacks."""
    report = view.report
    if report is None:
        return f"has not answered for {_seconds(now - view.since)}"
    words = [_whereabouts(report), f"for {_seconds(now - view.since)}"]
    if view.lacks:
        key, target = min(view.lacks.items(), key=lambda item: str(item[0]))
        more = f" and {len(view.lacks) - 1} more" if len(view.lacks) > 1 else ""
        words.append(
            f"and must still come to number {target} of {describe_key(key)}"
            f" (at {report.counters.get(key, 0)}){more}"
        )
    return " ".join(words)


def blame(views: Sequence[RankView], now: float) -> str:
    """Return one clause that names the rank that most likely keeps all others waiting."""
    if not views:
        return "there are no ranks"
    view = min(views, key=_innocence)
    text = f"rank {view.rank} {_verb(view)}{describe_rank(view, now)}"
    others = sum(_innocence(other)[0] == _innocence(view)[0] for other in views) - 1
    return text + (f", and {others} more like it" if others else "")


def explain(views: Sequence[RankView], now: float) -> str:
    """Return one line for each set of ranks that are at one place for one reason.

    The Python stack of the first rank of each set follows where it is known.
    """
    sets: dict[tuple[object, ...], list[RankView]] = {}
    for view in sorted(views, key=_innocence):
        sets.setdefault(_likeness(view), []).append(view)
    lines: list[str] = []
    for alike in sets.values():
        lines.append(f"{_ranks([view.rank for view in alike])}: {describe_rank(alike[0], now)}")
        stack = alike[0].report.stack if alike[0].report else ""
        lines += [f"    {line}" for line in stack.splitlines()]
    return "\n".join(lines)


def _whereabouts(report: Report) -> str:
    if report.state is State.PARKED and report.place is Place.GATE:
        held = [
            f"{describe_key(key)} (number {report.counters.get(key, 0) + 1})"
            for key in report.waiting
        ]
        return f"held before {' and '.join(held) or 'an operation'}"
    if report.state is State.PARKED:
        return _PLACES.get(report.place, "parked")
    return _STATES[report.state]


def _verb(view: RankView) -> str:
    report = view.report
    if report is None or report.state in (State.NOT_READY, State.ENDED):
        return "" if report is None or report.state is State.NOT_READY else "has "
    return "is "


def _innocence(view: RankView) -> tuple[int, float, int]:
    """Sort key: first who has not answered, then who does not stand, then who lacks something."""
    report = view.report
    if report is None:
        grade = 0
    elif report.state is not State.PARKED:
        grade = 1 if view.lacks or report.state is not State.RUNNING else 2
    else:
        grade = 3 if view.lacks else 4
    return grade, view.since, view.rank


def _likeness(view: RankView) -> tuple[object, ...]:
    report = view.report
    if report is None:
        return (None,)
    lacks = tuple(sorted((str(key), target) for key, target in view.lacks.items()))
    return report.state, report.place, report.waiting, lacks, report.stack


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_NAMED])
    more = len(ranks) - _MAX_RANKS_NAMED
    return f"ranks {named}" + (f" and {more} more" if more > 0 else "")


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.1f} s"
