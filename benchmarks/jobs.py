"""Starts the jobs that are measured."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import ROOT

PROGRAMS = Path(sys.executable).parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
STEP = re.compile(r"(rank \d+ )?step \d+ ")


def start(
    launcher: str, ranks: int, *command: object, repository: Path | None = None
) -> subprocess.Popen[str]:
    """Start a job under torchrun or torchmig-run; its standard output is the caller's to read."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if repository is not None:
        environment["TORCHMIG_REPO"] = str(repository)
        environment["TORCHMIG_RUNTIME_DIR"] = str(repository.parent)
    words = [str(PROGRAMS / launcher), f"--nproc-per-node={ranks}", *map(str, command)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


def expect(process: subprocess.Popen[str], code: int) -> None:
    """End the measurement unless a job has ended as it should."""
    if process.returncode != code:
        sys.exit(f"cannot measure: the job ended with {process.returncode} instead of {code}")
