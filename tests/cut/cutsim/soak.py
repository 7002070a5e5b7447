"""Many random programs side by side, or one of them looked at closely.

python -m cutsim.soak --programs 1000000     as `make soak-cut` does
python -m cutsim.soak --seed 4711            print what a seed draws, and what happens to it
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from random import Random

from cutsim.simulator import BrokenCutError, Outcome, Simulation, draw_scenario
from torchmig.cut import Orders, Report, Stand

CHUNK = 500


class Tally:
    """What came of many requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[tuple[int, str]] = []
        self.longest_rounds = 0

    def add(self, outcome: Outcome) -> None:
        self.counts["requests"] += 1
        self.counts["nudged"] += bool(outcome.nudges)
        self.longest_rounds = max(self.longest_rounds, outcome.rounds)
        if isinstance(outcome.verdict, Stand):
            self.counts[f"stands at level {outcome.level.name.lower()}"] += 1
        else:
            reason = outcome.verdict.reason
            kind = next(word for word in ("ended", "by its user", "within") if word in reason)
            names = {"ended": "job ended first", "within": "deadline, uncounted waits"}
            self.counts[f"withdrawn: {names.get(kind, kind)}"] += 1

    def update(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.failures += other.failures
        self.longest_rounds = max(self.longest_rounds, other.longest_rounds)

    def __str__(self) -> str:
        rows = [f"  {count:9,}  {name}" for name, count in sorted(self.counts.items())]
        return "\n".join([*rows, f"  {self.longest_rounds:9,}  rounds at most"])


def run_seeds(seeds: range) -> Tally:
    """Run one scenario a seed."""
    tally = Tally()
    for seed in seeds:
        tally.counts["programs"] += 1
        try:
            for outcome in Simulation(draw_scenario(Random(seed))).run():
                tally.add(outcome)
        except AssertionError as error:
            tally.failures.append((seed, str(error)))
    return tally


class Talking(Simulation):
    """A simulation that says what it sends."""

    def _send_orders(self, orders: Orders) -> None:
        for rank, order in orders:
            targets = {str(key): target for key, target in order.targets.items()}
            final = " final" if order.final else ""
            print(f"{self.now:9.4f} to {rank}: {order.serial} {order.level.name}{final} {targets}")
        super()._send_orders(orders)

    def _on_reports(self, reports: list[Report]) -> None:
        for report in reports:
            counters = {str(key): count for key, count in report.counters.items()}
            waiting = [str(key) for key in report.waiting]
            print(
                f"{self.now:9.4f} from {report.rank}: {report.serial} {report.state}"
                f" {report.place} {waiting} {counters} steps {report.steps}"
            )
        super()._on_reports(reports)


def show(seed: int) -> int:
    """Print a scenario and what happens in it."""
    scenario = draw_scenario(Random(seed))
    print(scenario.program)
    print(scenario.requests)
    try:
        Talking(scenario).run()
    except BrokenCutError as error:
        print(f"broken: {error}")
        return 1
    return 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, help="look at this one")
    options = parser.parse_args()
    if options.seed is not None:
        return show(options.seed)
    end = options.first + options.programs
    chunks = [range(start, min(start + CHUNK, end)) for start in range(options.first, end, CHUNK)]
    tally = Tally()
    started_at = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_seeds, chunk) for chunk in chunks]
        for number, future in enumerate(as_completed(futures), start=1):
            tally.update(future.result())
            if sys.stderr.isatty() or number % 100 == 0:
                done = tally.counts["programs"]
                print(f"{done:,} programs, {len(tally.failures)} failures", file=sys.stderr)
    seconds = time.monotonic() - started_at
    print(tally)
    print(f"{seconds:.0f} s, {options.programs / seconds:.0f} programs a second")
    for seed, message in sorted(tally.failures)[:20]:
        print(f"seed {seed}: {message}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
