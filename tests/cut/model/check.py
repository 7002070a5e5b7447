"""Check the model of the cut with spin: every interleaving, and that faults are found.

python tests/cut/model/check.py              what continuous integration runs
python tests/cut/model/check.py --all        every program, gates counting under orders too
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = Path(__file__).with_name("cut.pml")
FAULTS = ("NEVER_RAISES", "IGNORES_MESSAGES", "NEVER_TAKES_BACK")
# Both ways of waiting, and ranks that agree and disagree about what comes first.
SOME_ORDERS = (0, 5, 9)
HANGS_BY_ITSELF = {0b001, 0b110}
ALL_ORDERS = tuple(order for order in range(16) if order not in HANGS_BY_ITSELF)


def run(folder: Path, defines: list[str]) -> tuple[int, int]:
    """Return the numbers of errors and of states for a model with these definitions."""
    flags = [f"-D{define}" for define in defines]
    subprocess.run(["spin", "-a", *flags, MODEL], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    options = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=1024", "-DMEMLIM=8000"]
    subprocess.run(["cc", *options, "-o", "pan", "pan.c"], cwd=folder, check=True)
    result = subprocess.run(
        ["./pan", "-m200000"], cwd=folder, check=True, capture_output=True, text=True
    )
    errors = re.search(r"errors: (\d+)", result.stdout)
    states = re.search(r"(\d+) states, stored", result.stdout)
    # A fault ends the search early; so does a lack of memory, and then nothing is known.
    is_whole = "Search not completed" not in result.stdout
    if errors is None or states is None or not (is_whole or int(errors[1])):
        raise RuntimeError(f"spin did not finish:\n{result.stdout}{result.stderr}")
    return int(errors[1]), int(states[1])


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every program, not only some")
    options = parser.parse_args()
    for program, package in (("spin", "spin"), ("cc", "gcc")):
        if shutil.which(program) is None:
            print(
                f"cannot check the model: {program!r} is not on PATH; install {package!r}",
                file=sys.stderr,
            )
            return 1
    runs = [(["ROUNDS=1", f"ORDER={order}"], False) for order in SOME_ORDERS]
    if options.all:
        runs = [
            ([*hasty, "ROUNDS=1", f"ORDER={order}"], False)
            for hasty in ([], ["COUNTS_UNDER_ORDERS"])
            for order in ALL_ORDERS
        ]
    runs += [([fault, "ROUNDS=1", "ORDER=0"], True) for fault in FAULTS]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for defines, is_faulty in runs:
            started_at = time.monotonic()
            errors, states = run(Path(folder), defines)
            is_good = bool(errors) == is_faulty
            failed = failed or not is_good
            print(
                f"{'ok  ' if is_good else 'FAIL'} {' '.join(defines):32}"
                f" {'fault found' if errors else 'no error'}, {states:,} states,"
                f" {time.monotonic() - started_at:.0f} s",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
