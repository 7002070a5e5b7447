"""What torchmig costs a GPU job that nobody asks for anything.

Runs of GPT-2 small, one after the other and not side by side, since two jobs on a GPU take turns:
under torchrun, under torchmig-run, and under torchmig-run without the arena; again and again. Each
run is compared with the torchrun run of its round.

    python -m benchmarks.steady_state_gpu [--rounds 5] [--steps 200] [--ranks 1]
"""

import argparse
import itertools
import os
import statistics
import sys

from benchmarks.jobs import start
from benchmarks.machine import ROOT, save
from benchmarks.steady_state import WARM_UP_STEPS, step_moments

JOB = ROOT / "tests" / "gpu" / "multi_job.py"
WAYS = {
    "torchrun": ("torchrun",),
    "torchmig-run": ("torchmig-run",),
    "--no-arena": ("torchmig-run", "--no-arena"),
}


def main() -> int:
    """Measure, print, and write the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    kind = "gpt" if options.ranks == 1 else "ddp"

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        rounds.append({way: measure(way, options.ranks, kind, options.steps) for way in WAYS})
        medians = ", ".join(f"{way} {step * 1e3:.2f} ms" for way, step in rounds[-1].items())
        print(f"round {number + 1} of {options.rounds}: {medians}", flush=True)
    figures: dict[str, object] = {"rounds": rounds}
    for way in WAYS:
        steps = [each[way] for each in rounds]
        ratios = [each[way] / each["torchrun"] for each in rounds]
        cost = 100 * (statistics.median(ratios) - 1)
        figures[way] = cost
        print(
            f"{way:>12}: a step of {kind} takes {statistics.median(steps) * 1e3:.2f} ms, "
            f"{cost:+.2f}% (median of {len(ratios)}, "
            f"{100 * (min(ratios) - 1):+.2f}% to {100 * (max(ratios) - 1):+.2f}%)"
        )
    print(f"raw figures: {save('steady_state_gpu', figures).relative_to(ROOT)}")
    return 0


def measure(way: str, ranks: int, kind: str, steps: int) -> float:
    """Run the job once and return its median step in seconds."""
    launcher, *options = WAYS[way]
    process = start(launcher, ranks, *options, JOB, kind, steps, "", 0)
    moments = step_moments(process)[ranks * WARM_UP_STEPS :: ranks]
    return statistics.median(after - before for before, after in itertools.pairwise(moments))


if __name__ == "__main__":
    sys.exit(main())
