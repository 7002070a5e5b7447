"""GPU memory through all phases of a request, and back from each, with a stand-in for the driver.

What the driver and the devices themselves do is tested on GPUs, in tests/gpu.
"""

import re
import signal
import sys
from pathlib import Path

import pytest
from faulty import executable, mounted
from job_processes import job_of
from running import Run, by_rank, snapshots, unbroken

from torchmig.repo import Repository

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

STAND_IN = Path(__file__).with_name("gpu_stand_in")
JOB = str(STAND_IN / "job.py")
STEPS = "50"


@pytest.fixture
def program(tmp_path):
    return executable(
        tmp_path / "bin" / "torchmig-run",
        f'#!/bin/sh\nexec {sys.executable} {STAND_IN / "agent.py"} "$@"\n',
    )


def let_fail(folder, words):
    """Say what fails from now on in the jobs of a folder."""
    (folder / "faults").write_text(words)


def start(folder, program, ranks, *options, job=(STEPS,), faults=""):
    let_fail(folder, faults)
    restores = any("--restore" in option for option in options)
    job = () if restores else (JOB, *job)
    ranks = () if not job else (f"--nproc-per-node={ranks}",)
    env = {"STAND_IN_FAULTS": str(folder / "faults")}
    return Run(folder, *ranks, *options, *job, program=program, env=env)


def test_two_ranks_suspended_and_restored_on_swapped_gpus(tmp_path, program):
    first = start(tmp_path, program, 2).wait_for_step(5).suspend()
    second = start(tmp_path, program, 2, "--restore=latest", "--gpus=1,0").wait_for_step(12)
    second.suspend()
    assert second.errors.count("stand-in: restore") == 2
    third = start(tmp_path, program, 2, "--restore=latest").finish()
    lines = by_rank(first.text, second.text, third.text)
    assert lines == unbroken(2, JOB, STEPS)
    repository = Repository.open(str(tmp_path / "torchmig-repo"))
    for summary in snapshots(tmp_path):
        report = repository.load(summary["id"]).report
        assert report["gpu_bytes"] == 2 * ((14 << 20) + 100)


def test_a_job_migrates_to_other_gpus(tmp_path, program):
    verbs = executable(
        program.with_name("torchmig"),
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(STAND_IN)!r})\nimport devices\n"
        "from torchmig.commands._main import main\nsys.exit(main())\n",
    )
    job = job_of(tmp_path)
    first = start(tmp_path, program, 2, f"--job={job}").wait_for_step(5)
    refused = Run(tmp_path, "migrate", job, "--gpus=0,7", program=verbs)
    assert refused.wait() == 2
    assert "no GPU '7' on this host; there are: 0, 1" in refused.errors

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    second = Run(elsewhere, "migrate", job, "--gpus=1,0", program=verbs)
    assert first.wait() == 85, first.errors
    second.finish()
    assert second.errors.count("stand-in: restore") == 2
    said, lines = second.text.split("\n", 1)
    assert said == f"suspended into {snapshots(tmp_path)[0]['short_id']}"
    assert by_rank(first.text, lines) == unbroken(2, JOB, STEPS)


def test_a_checkpoint_goes_on_with_its_memory(tmp_path, program):
    run = start(tmp_path, program, 1).wait_for_step(5)
    run.signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
    reference = unbroken(1, JOB, STEPS)
    assert by_rank(run.finish().text) == reference
    again = by_rank(start(tmp_path, program, 1, "--restore=latest").finish().text)
    assert again[0] == reference[0][-len(again[0]) :]


FAILURES = {
    "lock": "the driver cannot lock process",
    "checkpoint": "the driver cannot checkpoint process",
    "staging": "staging can have 0 B of this host",
    "copy_out": "the stand-in does not copy",
    "refused": "rank 0: it uses managed memory",
    "waits shared": "rank 0: GPU 0 is shared with process 1: ",
}


def test_after_each_failure_the_job_trains_on(tmp_path, program):
    run = start(tmp_path, program, 2, faults="lock").wait_for_step(5)
    for words, reason in FAILURES.items():
        let_fail(tmp_path, words)
        run.signal(signal.SIGUSR2).wait_for(f"withdrawn, the job goes on: .*{reason}")
    let_fail(tmp_path, "")
    assert by_rank(run.finish().text) == unbroken(2, JOB, STEPS)
    assert snapshots(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_staging_smaller_than_the_memory_is_gone_through(tmp_path, program, number):
    job = ("20", "80")  # steps, MiB
    run = start(tmp_path, program, 1, "--staging=64M", job=job).wait_for_step(5)
    run.signal(number).wait_for("more than staging holds")
    reference = unbroken(1, JOB, *job)
    if number == signal.SIGUSR1:
        assert by_rank(run.finish().text) == reference
        again = start(tmp_path, program, 1, "--restore=latest", "--staging=64M").finish()
        lines = by_rank(again.text)[0]
        assert lines == reference[0][-len(lines) :]
    else:
        assert run.wait() == 85, run.errors
        again = start(tmp_path, program, 1, "--restore=latest", "--staging=64M").finish()
        assert by_rank(run.text, again.text) == reference


def test_memory_that_does_not_come_back_at_first_comes_back(tmp_path, program):
    run = start(tmp_path, program, 1, faults="copy_in").wait_for_step(5)
    run.signal(signal.SIGUSR1).wait_for("the stand-in does not copy")
    let_fail(tmp_path, "")
    assert by_rank(run.finish().text) == unbroken(1, JOB, STEPS)


def test_a_full_repository_is_found_out_late_and_the_job_trains_on(tmp_path, program):
    with mounted(tmp_path / "small", "size=8m") as small:
        run = start(tmp_path, program, 1, f"--repo={small}/repo").wait_for_step(5)
        run.signal(signal.SIGUSR2).wait_for("no space left")
        assert by_rank(run.finish().text) == unbroken(1, JOB, STEPS)


def test_gpus_that_do_not_do_are_refused_before_anything_is_started(tmp_path, program):
    first = start(tmp_path, program, 1, faults="waits").wait_for_step(5).suspend()
    for faults, reason in (
        ("memory", "GPU 0 has 1.000 MiB free"),
        ("shared", "process 1 is on GPU 0, where rank 0 would go"),
    ):
        refused = start(tmp_path, program, 1, "--restore=latest", faults=faults)
        assert refused.wait() == 21, refused.errors
        assert reason in refused.errors
        assert "stand-in: restore" not in refused.errors
    second = start(tmp_path, program, 1, "--restore=latest").finish()
    assert by_rank(first.text, second.text) == unbroken(1, JOB, STEPS)


def test_jobs_that_do_not_wait_share_gpus(tmp_path, program):
    run = start(tmp_path, program, 1, faults="shared").wait_for_step(5).suspend()
    again = start(tmp_path, program, 1, "--restore=latest", faults="shared")
    again.wait_for("restored from")
    for phase in (
        "fetch: .* MiB in",
        "load: .* MiB in",
        "restore: in",
        "driver: in",
        "rebuild: in",
    ):
        assert re.search(f"^torchmig: {phase}", again.errors, re.MULTILINE), again.errors
    let_fail(tmp_path, "")
    assert by_rank(run.text, again.finish().text) == unbroken(1, JOB, STEPS)
