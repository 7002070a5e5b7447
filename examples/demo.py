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
        messages: What torchmig-run said on standard error with ``--json``.
        first_step_seconds: From the start of the program to its first line about a step.
    """

    code: int = 0
    lines: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    first_step_seconds: float | None = None


def run(command: list[str], environment: dict[str, str], suspend_at: int | None = None) -> Run:
    """Run a program and pass its lines on; ask for a suspend once a certain step is done."""
    result = Run()
    begun = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
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
        result.code = process.wait()
        errors.seek(0)
        for line in errors:
            if line.startswith("{"):
                result.messages.append(json.loads(line))
            else:
                sys.stderr.write(line)
    return result


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
    print(f"\n{'unbroken':<44}  suspended and restored after steps {cuts}")
    for number in range(max(len(unbroken), len(broken))):
        left = unbroken[number] if number < len(unbroken) else "(no line)"
        right = broken[number] if number < len(broken) else "(no line)"
        mark = "" if left == right else "  <- differs"
        print(f"{left:<44}  {right}{mark}")
        if left != right and difference is None:
            difference = f"line {number + 1}: '{left}' and '{right}'"
    return difference


def print_measures(suspended: list[Run], sizes: list[int], resumed: list[Run]) -> None:
    """Print times and sizes of each suspend and of the restore that followed."""
    columns = ("cycle", "t_cut", "t_release", "t_durable", "t_resume", "held", "newly stored")
    print("\n" + "".join(f"{column:>14}" for column in columns))
    for number, (before, after) in enumerate(zip(suspended, resumed, strict=True)):
        summary = next(found for found in before.messages if found.get("event") == "suspended")
        times = [f"{summary['times'][name]:.2f} s" for name in columns[1:4]]
        stored = sizes[number] - (sizes[number - 1] if number else 0)
        cells = [
            str(number + 1),
            *times,
            f"{after.first_step_seconds or 0:.2f} s",
            f"{summary['sizes']['read_bytes'] / 2**20:.1f} MiB",
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

        command = [str(PROGRAMS / "torchmig-run"), "--json", "--job", "demo", *job]
        parts: list[Run] = []
        sizes: list[int] = []
        for suspend_at in [*options.suspend_at, None]:
            print(f"\ntorchmig-run {' '.join(command[1:])}")
            parts.append(run(command, environment, suspend_at))
            expect(parts[-1].code, 0 if suspend_at is None else SUSPENDED, "torchmig-run")
            sizes.append(stored_bytes(repository))
            command = [command[0], "--json", "--restore", "latest"]

        lines = [line for part in parts for line in part.lines]
        difference = print_columns(unbroken.lines, lines, options.suspend_at)
        print_measures(parts[:-1], sizes, parts[1:])
        print(f"\n{'identical' if difference is None else 'first difference: ' + difference}")
        return 0 if difference is None else 1
    finally:
        if options.keep:
            print(f"repository: {repository}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
