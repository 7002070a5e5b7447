"""The launchers with stand-ins for the schedulers' programs, which are not to be had here."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from torchmig.errors import ExitCode

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
ROOT = LAUNCHERS.parent


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that puts a shell script on PATH; all of them write what they are given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def put(name: str, body: str) -> None:
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "$CALLS"\n{body}\n')
        path.chmod(0o755)

    put.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    return put


def start(*arguments: str) -> int:
    return subprocess.run(
        [LAUNCHERS / "start-or-restore", *arguments], capture_output=True, check=False
    ).returncode


@pytest.mark.parametrize("answer", ["echo '[]'", "printf '[\\n]\\n'", "exit 10"])
def test_job_without_snapshot_is_started(programs, answer):
    programs("torchmig", answer)
    programs("torchmig-run", "exit 7")
    assert start("gpt", "--nnodes", "2", "train.py", "--restore", "mine") == 7
    assert programs.calls()[-1] == "torchmig-run --job gpt --nnodes 2 train.py --restore mine"


def test_job_with_snapshot_is_restored(programs):
    programs("torchmig", 'echo \'[{"id": "ab"}]\'')
    programs("torchmig-run", "exit 85")
    assert start("gpt", "train.py") == ExitCode.SUSPENDED
    assert programs.calls() == [
        "torchmig snapshots --job gpt --json",
        "torchmig-run --job gpt --restore latest train.py",
    ]


def test_repository_that_fails_starts_nothing(programs):
    programs("torchmig", "exit 22")
    programs("torchmig-run", "")
    assert start("gpt", "train.py") == ExitCode.INTEGRITY
    assert len(programs.calls()) == 1


def test_wrong_usage():
    assert start("gpt") == ExitCode.USAGE


@pytest.mark.parametrize(("code", "requeued"), [(85, True), (0, False), (1, False)])
def test_slurm_requeues_what_is_suspended(programs, code, requeued):
    programs("srun", f"exit {code}")
    programs("scontrol", "echo node1")
    environment = {
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "42",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    answer = subprocess.run(
        ["bash", LAUNCHERS / "slurm" / "train.sbatch", "train.py"],
        env={**os.environ, **environment},
        check=False,
    )
    assert answer.returncode == code
    assert ("scontrol requeue 42" in programs.calls()) is requeued
    assert any("start-or-restore train-42 --nnodes 2" in call for call in programs.calls())


def test_kubernetes_manifest_knows_the_exit_codes():
    job = yaml.safe_load((LAUNCHERS / "kubernetes" / "job.yaml").read_text())
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules[::2]}
    assert codes["Ignore"] == {ExitCode.SUSPENDED}
    assert codes["FailJob"] <= set(ExitCode)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules[::2]} == {container["name"]}
    assert f"--grace={pod['terminationGracePeriodSeconds']}s" in container["command"]
    assert (ROOT / container["command"][0]).stat().st_mode & 0o111
    assert container["securityContext"]["privileged"]
