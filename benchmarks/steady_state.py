"""What torchmig costs a job that nobody asks for anything.

Pairs of runs of the example at the same time, one under torchrun and one under torchmig-run, so
that whatever else the machine does slows both; and the time of a collective that does nothing.

    python -m benchmarks.steady_state [--pairs 5] [--steps 60]
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.jobs import EXAMPLE, STEP, expect, start
from benchmarks.machine import ROOT, save

LAUNCHERS = ("torchrun", "torchmig-run")
WARM_UP_STEPS = 5
RANKS = 2


def main() -> int:
    """Measure, print, and write the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    pairs = [measure_pair(options.steps) for _ in range(options.pairs)]
    ratios = [pair["torchmig-run"]["step"] / pair["torchrun"]["step"] for pair in pairs]
    print(f"{'pair':>4}  {'torchrun':>12}  {'torchmig-run':>12}  {'cost':>8}")
    for number, (pair, ratio) in enumerate(zip(pairs, ratios, strict=True), start=1):
        steps = [f"{pair[launcher]['step'] * 1e3:.2f} ms" for launcher in LAUNCHERS]
        print(f"{number:>4}  {steps[0]:>12}  {steps[1]:>12}  {100 * (ratio - 1):>+7.2f}%")
    cost = 100 * (statistics.median(ratios) - 1)
    spread = 100 * (max(ratios) - min(ratios))
    print(f"a step costs {cost:+.2f}% (median of {len(ratios)} pairs, {spread:.2f}% between them)")

    gates = [measure_gate() for _ in range(options.pairs)]
    differences = [gate["torchmig-run"] - gate["torchrun"] for gate in gates]
    gate_cost = statistics.median(differences)
    print(
        f"a collective costs {gate_cost:+.3f} us (median of {len(gates)} pairs, "
        f"{min(differences):+.3f} to {max(differences):+.3f} us)"
    )
    figures = {
        "pairs": pairs,
        "step_cost_percent": cost,
        "gates": gates,
        "collective_cost_microseconds": gate_cost,
    }
    print(f"raw figures: {save('steady_state', figures).relative_to(ROOT)}")
    return 0


def measure_pair(steps: int) -> dict[str, Any]:
    """Run the example under both launchers side by side; return the mean step of each.

    Only steps count that both jobs were in the middle of: without the first ones, and without those
    that one of them made alone.
    """
    jobs = {launcher: start(launcher, RANKS, EXAMPLE, "--steps", steps) for launcher in LAUNCHERS}
    with ThreadPoolExecutor(len(jobs)) as pool:
        moments = dict(zip(jobs, pool.map(step_moments, jobs.values()), strict=True))
    begun = max(ends[WARM_UP_STEPS] for ends in moments.values())
    ended = min(ends[-1] for ends in moments.values())
    pair = {}
    for launcher, ends in moments.items():
        both = [moment for moment in ends if begun <= moment <= ended]
        gaps = [after - before for before, after in itertools.pairwise(both)]
        pair[launcher] = {"step": statistics.mean(gaps), "gaps": gaps}
    return pair


def step_moments(process: subprocess.Popen[str]) -> list[float]:
    """Return when a job printed the line of each step."""
    with process:
        assert process.stdout is not None
        moments = [time.perf_counter() for line in process.stdout if STEP.match(line)]
    expect(process, 0)
    return moments


def measure_gate() -> dict[str, float]:
    """Return the time of an empty collective under both launchers, in microseconds."""
    figures = {}
    for launcher in LAUNCHERS:
        with start(launcher, 1, ROOT / "benchmarks" / "collectives_job.py") as process:
            answer, _ = process.communicate()
        expect(process, 0)
        figures[launcher] = float(json.loads(answer)["microseconds"])
    return figures


if __name__ == "__main__":
    sys.exit(main())
