"""What a suspend into a repository on disk and a restore from it cost a GPU job.

Beside the driver's checkpoint with CRIU of the same job to the same disk. Both images are out of
the page cache before they are read. *Release* is from the stand until the GPU's memory is free and,
in brackets, until the rank is gone; *resume* is what torchmig-run reports as t_resume and, in
brackets, from its start, imports included, until the first new step.

    python -m benchmarks.gpu_repository [fill16] [fill32] [gpt]

Needs what benchmarks.gpu_h200 needs. The job's losses have to be those of an unbroken run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gpu_h200 import GIB, STEPS, stock
from benchmarks.jobs import PROGRAMS
from torchmig.errors import ExitCode

JOB = machine.ROOT / "tests" / "gpu" / "multi_job.py"
WAIT_SECONDS = 120.0
TOUCH_SECONDS = 0.6  # for a GiB of staging, in the background
PAUSE_SECONDS = 0.05  # after each step
MARGIN_SECONDS = 15.0  # of steps, before and after the suspend


class Life:
    """One start of a launcher; what it prints goes into files."""

    def __init__(self, folder: Path, name: str, program: str, *options: object) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.begun = time.monotonic()
        words = [str(PROGRAMS / program), *map(str, options)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(words, stdout=out, stderr=err, cwd=folder)

    def wait_for_steps(self, count: int) -> float:
        """Return how long it took until so many steps were printed."""
        while len(self.steps) < count:
            if self.process.poll() is not None or time.monotonic() > self.begun + WAIT_SECONDS:
                self.process.kill()
                sys.exit(f"cannot measure: no step of the job\n{self.err.read_text()}")
            time.sleep(0.002)
        return time.monotonic() - self.begun

    @property
    def steps(self) -> list[str]:
        """The complete lines so far."""
        return self.out.read_text().rpartition("\n")[0].splitlines()

    def end(self, code: int) -> list[dict[str, Any]]:
        """Return the messages of a run that has ended as it should."""
        if self.process.wait(WAIT_SECONDS) != code:
            said = self.err.read_text()
            sys.exit(f"cannot measure: ended with {self.process.returncode}\n{said}")
        lines = self.err.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def forget_pages(folder: Path) -> None:
    """Take the files below a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def through_repository(kind: str, folder: Path) -> dict[str, Any]:
    """Suspend and restore a job under torchmig-run."""
    gib = int(kind[4:]) + 1 if kind.startswith("fill") else 8
    touching = gib * TOUCH_SECONDS
    steps = int((touching + MARGIN_SECONDS) / PAUSE_SECONDS)
    options = ("torchmig-run", "--json", f"--staging={gib}G")
    job = ("--nproc-per-node=1", JOB, kind, steps, "")
    first = Life(folder, "first", *options, *job, PAUSE_SECONDS)
    first.wait_for_steps(STEPS)
    time.sleep(touching)
    first.process.send_signal(signal.SIGUSR2)
    suspended = first.end(ExitCode.SUSPENDED)[-1]
    machine.say(f"{kind}: suspended after {len(first.steps)} of {steps} steps")
    forget_pages(folder / "torchmig-repo")
    again = Life(folder, "again", *options, "--restore=latest")
    resume = again.wait_for_steps(1)
    messages = again.end(ExitCode.OK)
    machine.say(f"{kind}: restored")
    unbroken = Life(folder, "unbroken", "torchrun", *job, 0)
    unbroken.end(ExitCode.OK)
    assert first.steps + again.steps == unbroken.steps
    times = suspended["times"]
    return {
        **times,
        **suspended["sizes"],
        "release": times["t_gpu_free"] - times["t_cut"],
        "gone": times["t_release"] - times["t_cut"],
        "resume": resume,
        "t_resume": next(m["t_resume"] for m in messages if m.get("event") == "restored"),
        "phases": [
            (m["time"], m["phase"], m["state"], m["seconds"], m["bytes"])
            for m in messages
            if m["message_type"] == "status"
        ],
    }


def main(kinds: list[str]) -> None:
    """Measure the named jobs, or all, and print a table."""
    results: dict[str, Any] = {}
    for kind in kinds or ["fill16", "gpt"]:
        folder = Path(tempfile.mkdtemp(prefix="torchmig-bench-"))
        try:
            beside = stock(kind, folder, None, forget_pages)
            machine.say(f"{kind}: restored by driver and CRIU")
            ours = through_repository(kind, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        results[kind] = {"ours": ours, "stock": beside}
        print(kind, results[kind], flush=True)
        print(
            f"| {kind} | {beside['release_total']:.2f} s | {ours['release']:.2f} s "
            f"({ours['gone']:.2f} s) | {beside['release_total'] / ours['release']:.1f} | "
            f"{beside['resume_total']:.2f} s | {ours['t_resume']:.2f} s "
            f"({ours['resume']:.2f} s) | {beside['resume_total'] / ours['t_resume']:.1f} | "
            f"{beside['image'] / GIB:.2f} GiB | {ours['stored_bytes'] / GIB:.2f} GiB |",
            flush=True,
        )
    print(machine.save("gpu_repository", results))


if __name__ == "__main__":
    main(sys.argv[1:])
