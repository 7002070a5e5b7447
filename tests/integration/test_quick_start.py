"""The commands of the README and `make demo`, as a new user gives them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import ForkedRun

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
STEP = re.compile(r"step (\d+) loss (\S+)")


@pytest.fixture
def environment(tmp_path_factory):
    """A place of its own for sockets; its path is short, as a socket's has to be."""
    folder = tmp_path_factory.mktemp("qs")
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "TORCHMIG_RUNTIME_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def quick_start(repository: Path) -> list[str]:
    """Return the shell blocks of the quick start, with a repository and a length for a test."""
    text = (ROOT / "README.md").read_text().split("## Quick start")[1].split("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    changes = {
        "make setup\n": "",  # done, or these tests would not run
        "/var/tmp/snapshots": str(repository),
        "--steps 100": f"--steps {STEPS}",
    }
    for before, after in changes.items():
        assert sum(before in block for block in blocks) == 1, before
        blocks = [block.replace(before, after) for block in blocks]
    return blocks


def losses(output: str) -> list[tuple[int, str]]:
    return [(int(number), loss) for number, loss in STEP.findall(output)]


def shell(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -e\n{script}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_start_of_the_readme(environment, tmp_path):
    start, suspend, resume = quick_start(tmp_path / "repository")
    environment["TORCHMIG_REPO"] = str(tmp_path / "repository")
    command = ["bash", "-c", f"set -e\n{start}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        before = ""
        for line in process.stdout:
            before += line
            if line.startswith("step 3 "):
                answer = shell(suspend, environment)
                assert answer.returncode == 0, answer.stderr
                assert re.search(r"^gpt\b", answer.stdout, re.MULTILINE)
    assert process.returncode == 85

    answer = shell(resume, environment)
    assert answer.returncode == 0, answer.stderr
    assert "gpt" in answer.stdout
    steps = losses(before) + losses(answer.stdout)
    assert [number for number, _ in steps] == list(range(1, STEPS + 1))
    words = ("--nproc-per-node=2", ROOT / "examples" / "train_gpt.py", "--steps", STEPS)
    unbroken = ForkedRun(tmp_path, *words, program="torchrun").finish()
    assert steps == losses(unbroken.text)


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demonstration_is_identical(environment):
    command = [sys.executable, "examples/demo.py", "--steps", "10", "--suspend-at", "3", "6"]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1] == "identical"
    for name in ("t_cut", "t_release", "t_durable", "t_resume"):
        assert name in answer.stdout
