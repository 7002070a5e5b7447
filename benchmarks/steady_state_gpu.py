"""What torchmig costs a GPU job that nobody asks for anything.

Runs of GPT-2 small with batches that keep the GPUs busy (where a step waits for the processor, it
takes as long as that happens to take), one after the other, since two jobs on a GPU take turns:
under torchrun, under torchmig-run, and under torchmig-run without the arena; again and again. Each
run is compared with the torchrun run of its round, by the mean and by the median of the steps in
its second half: in the first one the agent finds memory for staging.

    python -m benchmarks.steady_state_gpu [--rounds 5] [--steps 80] [--ranks 1]
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.jobs import expect, start
from benchmarks.machine import ROOT, save

JOB = ROOT / "tests" / "gpu" / "multi_job.py"
WAYS = {
    "torchrun": ("torchrun",),
    "torchmig-run": ("torchmig-run", "--staging=2G"),
    "--no-arena": ("torchmig-run", "--staging=2G", "--no-arena"),
}


def main() -> int:
    """Measure, print, and write the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    rounds: list[dict[str, list[float]]] = []
    for number in range(options.rounds):
        rounds.append({way: measure(way, options.ranks, options.steps) for way in WAYS})
        steps = ", ".join(f"{way} {statistics.mean(rounds[-1][way]) * 1e3:.2f} ms" for way in WAYS)
        print(f"round {number + 1} of {options.rounds}: {steps}", flush=True)
    figures: dict[str, object] = {"rounds": rounds}
    for way in WAYS:
        mean = statistics.median(statistics.mean(each[way]) for each in rounds)
        costs = figures[way] = {
            name: [100 * (take(each[way]) / take(each["torchrun"]) - 1) for each in rounds]
            for name, take in (("mean", statistics.mean), ("median", statistics.median))
        }
        print(
            f"{way:>12}: a step takes {mean * 1e3:.2f} ms, "
            + ", ".join(
                f"{name} {statistics.median(each):+.2f}% ({min(each):+.2f}% to {max(each):+.2f}%)"
                for name, each in costs.items()
            )
        )
    print(f"raw figures: {save('steady_state_gpu', figures).relative_to(ROOT)}")
    return 0


def measure(way: str, ranks: int, steps: int) -> list[float]:
    """Run the job once and return how long the steps of its second half took, in seconds."""
    launcher, *options = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="torchmig-bench-") as folder:
        # By the job's own clock: torchmig-run passes lines on in bursts.
        kept = Path(folder) / "moments"
        with start(launcher, ranks, *options, JOB, "heavy", steps, "", 0, kept) as process:
            process.communicate()
        expect(process, 0)
        moments = json.loads(kept.read_text())[steps // 2 :]
    return [after - before for before, after in itertools.pairwise(moments)]


if __name__ == "__main__":
    sys.exit(main())
