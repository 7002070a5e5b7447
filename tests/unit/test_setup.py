"""What a user reads when the build cannot begin."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_setup(prelude: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    script = f"""
import runpy, sys
{prelude}
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py")
"""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_missing_compiler_is_one_sentence():
    answer = run_setup(CXX="/nonexistent/c++ -pipe")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "'/nonexistent/c++' is not on PATH" in line
    assert "apt-get install g++" in line


def test_missing_torch_is_one_sentence():
    answer = run_setup("sys.modules['torch'] = None")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "torch cannot be imported" in line
    assert "--no-build-isolation" in line
