"""Trains twice and compares: once unbroken, once suspended and restored on the way.

    make demo

The first run is under torchrun. The second is under torchmig-run, gets SIGUSR2 in the middle of its
steps, ends with exit code 85, and is restored from its snapshot by a new torchmig-run, as often as
``--suspend-at`` says. Both loss columns must agree to the last digit.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("train_gpt.py")
PROGRAMS = Path(sys.executable).parent
RANKS = 2
SUSPENDED = 85
STEP = re.compile(r"step (\d+) loss (\S+)")


@dataclass
class Run:
    """What one program printed, and when.

    Attributes:
        code: Exit code.
        lines: Standard output.
        first_step_seconds: From the start of the program to its first line about a step.
    """

    code: int = 0
    lines: list[str] = field(default_factory=list)
    first_step_seconds: float | None = None


def run(command: list[str], environment: dict[str, str], suspend_at: int | None = None) -> Run:
    """Run a program and pass its lines on; ask for a suspend once a certain step is done."""
    result = Run()
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            result.lines.append(line.rstrip("\n"))
            match = STEP.match(line)
            if match is None:
                continue
            if result.first_step_seconds is None:
                result.first_step_seconds = time.monotonic() - begun
            if int(match[1]) == suspend_at:
                print("  SIGUSR2 to torchmig-run", flush=True)
                process.send_signal(signal.SIGUSR2)
    result.code = process.returncode
    return result


def torchmig_json(environment: dict[str, str], *arguments: str) -> Any:
    """Return what a verb prints with ``--json``."""
    command = [str(PROGRAMS / "torchmig"), *arguments, "--json"]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(answer.stdout)


def stored_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def expect(code: int, expected: int, what: str) -> None:
    """End the demonstration unless a program ended as it should."""
    if code != expected:
        sys.exit(f"demo: {what} ended with {code} instead of {expected}")


def print_columns(unbroken: list[str], broken: list[str], cuts: list[int]) -> str | None:
    """Print both runs side by side and return the first difference."""
    difference = None
    print(f"\n{'unbroken':<36}  suspended and restored after steps {cuts}")
    for number in range(max(len(unbroken), len(broken))):
        left = unbroken[number] if number < len(unbroken) else "(no line)"
        right = broken[number] if number < len(broken) else "(no line)"
        mark = "" if left == right else "  <- differs"
        print(f"{left:<36}  {right}{mark}")
        if left != right and difference is None:
            difference = f"line {number + 1}: '{left}' and '{right}'"
    return difference


def print_measures(snapshots: list[dict[str, Any]], sizes: list[int], resumed: list[float]) -> None:
    """Print times and sizes of each suspend and of the restore that followed."""
    columns = ("cycle", "t_cut", "t_release", "t_durable", "t_resume", "held", "newly stored")
    print("\n" + "".join(f"{column:>14}" for column in columns))
    for number, snapshot in enumerate(snapshots):
        report = snapshot["report"]
        times = [f"{report[name]:.2f} s" for name in ("t_cut", "t_release", "t_durable")]
        stored = sizes[number] - (sizes[number - 1] if number else 0)
        cells = [
            str(number + 1),
            *times,
            f"{resumed[number]:.2f} s",
            f"{report['read_bytes'] / 2**20:.1f} MiB",
            f"{stored / 2**20:.1f} MiB",
        ]
        print("".join(f"{cell:>14}" for cell in cells))
    print(
        "t_resume is from the start of torchmig-run to its first step; the rest is from the signal"
    )


def main() -> int:
    """Run everything and return 0 if both runs printed the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--suspend-at", type=int, nargs="+", default=[12, 26], metavar="STEP")
    parser.add_argument("--keep", action="store_true", help="leave the repository behind")
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="torchmig-demo-"))
    repository = folder / "repository"
    environment = {**os.environ, "TORCHMIG_REPO": str(repository), "OMP_NUM_THREADS": "1"}
    environment.setdefault("TORCHMIG_RUNTIME_DIR", str(folder))
    job = [f"--nproc-per-node={RANKS}", str(SCRIPT), "--steps", str(options.steps)]
    try:
        print(f"unbroken: torchrun {' '.join(job)}")
        unbroken = run([str(PROGRAMS / "torchrun"), *job], environment)
        expect(unbroken.code, 0, "torchrun")

        launcher = str(PROGRAMS / "torchmig-run")
        command = [launcher, "--job", "demo", *job]
        lines: list[str] = []
        sizes: list[int] = []
        resumed: list[float] = []
        for suspend_at in [*options.suspend_at, None]:
            print(f"\n{' '.join(['torchmig-run', *command[1:]])}")
            part = run(command, environment, suspend_at)
            expect(part.code, 0 if suspend_at is None else SUSPENDED, "torchmig-run")
            lines += part.lines
            if len(command) == 3:
                resumed.append(part.first_step_seconds or 0.0)
            if suspend_at is not None:
                sizes.append(stored_bytes(repository))
            command = [launcher, "--restore", "latest"]

        listed = torchmig_json(environment, "snapshots")
        listed.sort(key=lambda snapshot: str(snapshot["created"]))
        snapshots = [torchmig_json(environment, "show", entry["id"]) for entry in listed]
        difference = print_columns(unbroken.lines, lines, options.suspend_at)
        print_measures(snapshots, sizes, resumed)
        print(f"\n{'identical' if difference is None else 'first difference: ' + difference}")
        return 0 if difference is None else 1
    finally:
        if options.keep:
            print(f"repository: {repository}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
