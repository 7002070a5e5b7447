"""Planners with one fault each. If the simulation lets one through, it proves nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torchmig.cut import Channel, Orders, Pending, Planner, Report, Stand, State


class NeverRaises(Planner):
    """A rank that is held before one group is not let on when another group waits for it."""

    def _let_on(self, index: int) -> None:
        pass


class IgnoresMessages(Planner):
    """Point-to-point channels are not looked at."""

    def reports(self, reports: Iterable[Report], now: float) -> Orders:
        return super().reports(map(self._without_messages, reports), now)

    @staticmethod
    def _without_messages(report: Report) -> Report:
        counters = {
            key: count for key, count in report.counters.items() if not isinstance(key, Channel)
        }
        return replace(report, counters=counters)


class ParksInBlocks(Planner):
    """A rank inside a coalesced block passes for parked."""

    def reports(self, reports: Iterable[Report], now: float) -> Orders:
        return super().reports(
            [
                replace(report, state=State.PARKED) if report.state is State.BUSY else report
                for report in reports
            ],
            now,
        )


class NeverConfirms(Planner):
    """A stand is believed from reports that came in at different times."""

    def _decide(self, now: float) -> Orders:
        orders = super()._decide(now)
        if self._final and isinstance(self.verdict, Pending):
            self.verdict = Stand(tuple(dict(counters) for counters in self._ledger.counters))
        return orders


class BelievesOldReports(Planner):
    """A report from before the last order counts, whatever that order has set going."""

    def _place(self, index: int) -> None:
        rank = self._ranks[index]
        if rank.report is not None and rank.order is not None:
            rank.report = replace(rank.report, serial=rank.order.serial)
        super()._place(index)


MUST_BE_CAUGHT = (NeverRaises, IgnoresMessages, ParksInBlocks)
ALSO_CAUGHT = (NeverConfirms, BelievesOldReports)
