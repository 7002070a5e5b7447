"""What a checkpoint costs: times, shares, and what is stored again.

One job of the example gets checkpoints after which it goes on, each asked for in the middle of its
steps. Printed for each: t_cut in steps, the stall, t_durable with the shares of CRIU, of the store
and of everything else, and how much of the job's bytes was new.

    python -m benchmarks.checkpoints [--checkpoints 5] [--steps-between 10]
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import EXAMPLE, PROGRAMS, STEP, expect, start
from benchmarks.machine import ROOT, save
from torchmig.errors import ExitCode

RANKS = 2
JOB = "benchmark"


def main() -> int:
    """Measure, print, and write the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--steps-between", type=int, default=10)
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="torchmig-"))
    try:
        moments, outcomes = measure(folder, options.checkpoints, options.steps_between)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    step = statistics.median(gaps)
    columns = ("t_cut", "t_cut/step", "stall", "t_durable", "CRIU", "store", "other", "new bytes")
    print("".join(f"{column:>12}" for column in columns))
    for outcome in outcomes:
        times, sizes = outcome["times"], outcome["sizes"]
        other = times["t_durable"] - times["criu"] - times["store"]
        cells = [
            f"{times['t_cut']:.3f} s",
            f"{times['t_cut'] / step:.2f}",
            f"{times['stall']:.2f} s",
            f"{times['t_durable']:.2f} s",
            *(share(part, times["t_durable"]) for part in (times["criu"], times["store"], other)),
            share(sizes["new_bytes"], sizes["read_bytes"]),
        ]
        print("".join(f"{cell:>12}" for cell in cells))
    print(f"a step takes {step:.3f} s; the longest gap between two was {max(gaps):.2f} s")
    figures = {"outcomes": outcomes, "gaps": gaps, "step": step}
    print(f"raw figures: {save('checkpoints', figures).relative_to(ROOT)}")
    return 0


def share(part: float, whole: float) -> str:
    """Return a part of a whole in percent."""
    return f"{100 * part / whole:.1f}%"


def measure(folder: Path, checkpoints: int, between: int) -> tuple[list[float], list[Any]]:
    """Run one job, ask for the checkpoints, and return when its steps ended and what they brought.

    The next checkpoint is asked for some steps after the last one is durable, on a thread of its
    own, since the steps beside it are timed. A suspend ends the job.
    """
    moments: list[float] = []
    outcomes: list[Any] = []
    asking: threading.Thread | None = None
    due = between
    arguments = ("--job", JOB, EXAMPLE, "--steps", 10**6)
    with start("torchmig-run", RANKS, *arguments, repository=folder / "repository") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not STEP.match(line):
                continue
            moments.append(time.perf_counter())
            if asking is not None and not asking.is_alive():
                asking, due = None, len(moments) + between
            elif asking is None and len(moments) == due:
                if len(outcomes) < checkpoints:
                    asking = threading.Thread(target=lambda: outcomes.append(ask(folder)))
                    asking.start()
                else:
                    process.send_signal(signal.SIGUSR2)
    expect(process, ExitCode.SUSPENDED)
    if None in outcomes:
        sys.exit("cannot measure: not every checkpoint was made")
    return moments, outcomes


def ask(folder: Path) -> Any:
    """Ask for a checkpoint and return its outcome, None if there is none."""
    environment = {**os.environ, "TORCHMIG_RUNTIME_DIR": str(folder)}
    command = [PROGRAMS / "torchmig", "checkpoint", JOB, "--json"]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    return json.loads(answer.stdout) if answer.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
