"""Memory stays within the stated budget, however much is written and read."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLACK_MIB = 48  # the interpreter's own growth, threads' stacks, the index, a piece for each thread


@pytest.mark.parametrize("budget_mib", [32, 160])
def test_the_peak_is_bounded_by_the_budget(tmp_path, budget_mib):
    command = [sys.executable, "-m", "benchmarks.bench_repo_memory", "budget"]
    command += [str(tmp_path / "place"), "400", str(budget_mib)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= budget_mib + SLACK_MIB
