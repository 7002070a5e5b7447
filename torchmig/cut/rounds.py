"""One message a node and round: reports of a node's ranks together, orders for them together.

Keys and members of groups are written once a message. A run of members is written as first, step,
length, so that the whole world and the rows of a grid cost three numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from torchmig.cut.keys import Key, parse_key
from torchmig.cut.messages import Level, Order, Place, Report, State, Wire


def pack_reports(reports: Iterable[Report], known_groups: set[str] | None = None) -> Wire:
    """Return the plain form of a node's reports.

    Groups in `known_groups` are left out and new ones are added to it; keep one set for each
    request and connection.
    """
    table = _KeyTable()
    known = set() if known_groups is None else known_groups
    groups: dict[str, list[int]] = {}
    rows: list[list[Any]] = []
    for report in reports:
        for group, members in report.groups.items():
            if group not in known:
                known.add(group)
                groups[group] = pack_ranks(members)
        rows.append(
            [
                report.rank,
                report.request,
                report.serial,
                report.sequence,
                str(report.state),
                str(report.place),
                [table.index(key) for key in report.waiting],
                table.flatten(report.counters.items()),
                report.steps,
                report.seconds_per_step,
                report.stack,
            ]
        )
    return {"keys": table.texts, "groups": groups, "reports": rows}


def unpack_reports(wire: Wire) -> list[Report]:
    """Return the reports of a node's message; all share one mapping of groups."""
    keys = [parse_key(text) for text in wire["keys"]]
    groups = {group: unpack_ranks(runs) for group, runs in wire["groups"].items()}
    reports: list[Report] = []
    for row in wire["reports"]:
        rank, request, serial, sequence, state, place, waiting, counters, *rest = row
        steps, seconds_per_step, stack = rest
        reports.append(
            Report(
                rank=rank,
                request=request,
                serial=serial,
                sequence=sequence,
                state=State(state),
                place=Place(place),
                waiting=tuple(keys[index] for index in waiting),
                counters=_unflatten(keys, counters),
                groups=groups,
                steps=steps,
                seconds_per_step=seconds_per_step,
                stack=stack,
            )
        )
    return reports


def split_orders(
    orders: Iterable[tuple[int, Order]], node_of: Callable[[int], int]
) -> dict[int, list[tuple[int, Order]]]:
    """Return the orders of each node that has any."""
    nodes: dict[int, list[tuple[int, Order]]] = {}
    for rank, order in orders:
        nodes.setdefault(node_of(rank), []).append((rank, order))
    return nodes


def pack_orders(orders: Iterable[tuple[int, Order]]) -> Wire:
    """Return the plain form of a node's orders; ranks that are told the same share one entry."""
    table = _KeyTable()
    rows: dict[tuple[Any, ...], list[int]] = {}
    for rank, order in orders:
        targets = table.flatten(order.targets.items())
        row = (order.request, order.serial, int(order.level), order.final, *targets)
        rows.setdefault(row, []).append(rank)
    return {"keys": table.texts, "orders": [[ranks, *row] for row, ranks in rows.items()]}


def unpack_orders(wire: Wire) -> list[tuple[int, Order]]:
    """Return the orders of a node's message."""
    keys = [parse_key(text) for text in wire["keys"]]
    orders: list[tuple[int, Order]] = []
    for ranks, request, serial, level, final, *targets in wire["orders"]:
        order = Order(request, serial, Level(level), _unflatten(keys, targets), final)
        orders += [(rank, order) for rank in ranks]
    return orders


def pack_ranks(members: Sequence[int]) -> list[int]:
    """Return `members` as a flat list of runs: first, step, length."""
    runs: list[int] = []
    for member in members:
        if runs and runs[-1] == 1:
            runs[-2] = member - runs[-3]
            runs[-1] = 2
        elif runs and member == runs[-3] + runs[-2] * runs[-1]:
            runs[-1] += 1
        else:
            runs += [member, 1, 1]
    return runs


def unpack_ranks(runs: Sequence[int]) -> tuple[int, ...]:
    """Return the members that `pack_ranks` wrote.

    Every node names the group of all ranks; they are to share one tuple, not to hold one each.
    """
    return _unpack_runs(tuple(runs))


@lru_cache(maxsize=8192)
def _unpack_runs(runs: tuple[int, ...]) -> tuple[int, ...]:
    members: list[int] = []
    for first, step, length in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        members += [first + step * index for index in range(length)]
    return tuple(members)


class _KeyTable:
    """Gives each key of a message a small number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._indexes: dict[Key, int] = {}

    def index(self, key: Key) -> int:
        found = self._indexes.get(key)
        if found is None:
            found = self._indexes[key] = len(self.texts)
            self.texts.append(str(key))
        return found

    def flatten(self, counts: Iterable[tuple[Key, int]]) -> list[int]:
        return [number for key, count in counts for number in (self.index(key), count)]


def _unflatten(keys: Sequence[Key], numbers: Sequence[int]) -> dict[Key, int]:
    return {keys[index]: count for index, count in zip(numbers[::2], numbers[1::2], strict=True)}
