"""GPU memory through all phases of a request, and back from each, with a stand-in for the driver.

What the driver and the devices themselves do is tested on GPUs, in tests/gpu.
"""

import re
import signal
import sys
from pathlib import Path

import pytest
from faulty import executable, mounted, python_program, remount
from job_processes import assert_nothing_left, job_of
from running import ForkedRun, Run, by_rank, snapshots, unbroken

from torchmig.errors import ExitCode
from torchmig.repo import Repository

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

STAND_IN = Path(__file__).with_name("gpu_stand_in")
JOB = str(STAND_IN / "job.py")
STEPS = "50"


def let_fail(folder, words):
    """Say what fails from now on in the jobs of a folder; with any word they do not end."""
    (folder / "faults").write_text(words)


def start(folder, ranks, *options, job=(STEPS,), faults="", program=None):
    let_fail(folder, faults)
    restores = any("--restore" in option for option in options)
    job = () if restores else (JOB, *job)
    ranks = () if not job else (f"--nproc-per-node={ranks}",)
    env = {"STAND_IN_FAULTS": str(folder / "faults")}
    if program is not None:
        return Run(folder, *ranks, *options, *job, program=program, env=env)
    return ForkedRun(folder, *ranks, *options, *job, program=STAND_IN / "agent.py", env=env)


FAILURES = {
    "lock": "the driver cannot lock process",
    "checkpoint": "the driver cannot checkpoint process",
    "staging": "staging can have 0 B of this host",
    "copy_out": "the stand-in does not copy",
    "refused": "rank 0: it uses managed memory",
    "waits shared": "rank 0: GPU 0 is shared with process 1: ",
}


def test_two_ranks_on_swapped_gpus_train_on_after_each_failure(tmp_path):
    first = start(tmp_path, 2).wait_for_step(5).suspend()
    second = start(tmp_path, 2, "--restore=latest", "--gpus=1,0", faults="wait")
    second.wait_for(r"^rank 1 step ")
    assert second.errors.count("stand-in: restore") == 2
    for words, reason in FAILURES.items():
        let_fail(tmp_path, words)
        second.signal(signal.SIGUSR2).wait_for(f"withdrawn, the job goes on: .*{reason}")
    assert len(snapshots(tmp_path)) == 1
    let_fail(tmp_path, "wait")
    second.suspend()
    third = start(tmp_path, 2, "--restore=latest").finish()
    lines = by_rank(first.text, second.text, third.text)
    assert lines == unbroken(2, JOB, STEPS)
    repository = Repository.open(str(tmp_path / "torchmig-repo"))
    for summary in snapshots(tmp_path):
        report = repository.load(summary["id"]).report
        assert report["gpu_bytes"] == 2 * ((14 << 20) + 100)


def test_a_job_migrates_to_other_gpus(tmp_path):
    """By programs beside each other: `torchmig` starts the `torchmig-run` of its own folder."""
    program = python_program(tmp_path / "bin" / "torchmig-run", STAND_IN / "agent.py")
    verbs = executable(
        program.with_name("torchmig"),
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(STAND_IN)!r})\nimport devices\n"
        "from torchmig.commands._main import main\nsys.exit(main())\n",
    )
    job = job_of(tmp_path)
    first = start(tmp_path, 2, f"--job={job}", program=program).wait_for_step(5)
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


def test_memory_comes_back_after_failures_and_after_a_checkpoint(tmp_path):
    with mounted(tmp_path / "small", "size=8m") as small:
        run = start(tmp_path, 1, f"--repo={small}/repo", faults="wait").wait_for_step(5)
        # A full repository is found out late.
        run.signal(signal.SIGUSR2).wait_for("withdrawn, the job goes on: .*no space left")
        remount(small, "size=2g")
        let_fail(tmp_path, "copy_in")
        run.signal(signal.SIGUSR1).wait_for("the stand-in does not copy")
        let_fail(tmp_path, "wait")
        run.signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
        let_fail(tmp_path, "")
        reference = unbroken(1, JOB, STEPS)
        assert by_rank(run.finish().text) == reference
        again = by_rank(
            start(tmp_path, 1, f"--repo={small}/repo", "--restore=latest").finish().text
        )
        assert again[0] == reference[0][-len(again[0]) :]


def test_staging_smaller_than_the_memory_is_gone_through(tmp_path):
    job = ("12", "80")  # steps, MiB
    staging = "--staging=64M"
    run = start(tmp_path, 1, staging, job=job, faults="wait").wait_for_step(2)
    run.signal(signal.SIGUSR1).wait_for("more than staging holds")
    run.wait_for("checkpointed into snapshot").suspend()
    assert run.errors.count("more than staging holds") == 2
    reference = unbroken(1, JOB, *job)
    for summary in snapshots(tmp_path):
        again = start(tmp_path, 1, f"--restore={summary['id']}", staging).finish()
        assert by_rank(run.text, again.text) == reference, summary["kind"]


def test_gpu_memory_that_is_damaged_is_not_restored(tmp_path):
    run = start(tmp_path, 1, job=("12", "80")).wait_for_step(2).suspend()
    repository = Repository.open(str(tmp_path / "torchmig-repo"))
    manifest = repository.load("latest")
    (stream,) = (s for s in manifest.ranks[0].streams if s.name == "rank-0/gpu/0")
    with repository.reader(manifest) as reader:
        place = reader.locate(stream, reader.rows(stream)[-1])
    (pack,) = (tmp_path / "torchmig-repo").rglob(place.pack_id.hex())
    data = pack.read_bytes()
    damaged = bytearray(data)
    damaged[place.offset_bytes + place.stored_bytes // 2] ^= 1
    pack.write_bytes(damaged)
    refused = start(tmp_path, 1, "--restore=latest")
    assert refused.wait() == ExitCode.INTEGRITY, refused.errors
    assert "stream 'rank-0/gpu/0' of snapshot" in refused.errors
    assert not by_rank(refused.text)
    pack.write_bytes(data)
    again = start(tmp_path, 1, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == unbroken(1, JOB, "12", "80")


def test_a_loader_that_ends_early_is_replaced_and_a_second_one_missed(tmp_path):
    run = start(tmp_path, 2).wait_for_step(5).suspend()
    again = start(tmp_path, 2, "--restore=latest", faults="loader loaders")
    assert again.wait() == 1
    assert "the process that brings the snapshot has ended with -9" in again.errors
    assert_nothing_left(tmp_path)
    again = start(tmp_path, 2, "--restore=latest", faults="loader").wait_for("restored from")
    let_fail(tmp_path, "")
    assert by_rank(run.text, again.finish().text) == unbroken(2, JOB, STEPS)


def test_gpus_that_do_not_do_are_refused_and_shared_ones_where_nobody_waits(tmp_path):
    texts = [start(tmp_path, 1, faults="shared").wait_for_step(5).suspend().text]
    again = start(tmp_path, 1, "--restore=latest", faults="shared")
    again.wait_for("restored from")
    for phase in (
        "fetch: .* MiB in",
        "load: .* MiB in",
        "restore: in",
        "driver: in",
        "rebuild: in",
    ):
        assert re.search(f"^torchmig: {phase}", again.errors, re.MULTILINE), again.errors
    let_fail(tmp_path, "waits")
    texts.append(again.suspend().text)
    for faults, reason in (
        ("memory", "GPU 0 has 1.000 MiB free"),
        ("shared", "process 1 is on GPU 0, where rank 0 would go"),
    ):
        refused = start(tmp_path, 1, "--restore=latest", faults=faults)
        assert refused.wait() == 21, refused.errors
        assert reason in refused.errors
        assert "stand-in: restore" not in refused.errors
    last = start(tmp_path, 1, "--restore=latest").finish()
    assert by_rank(*texts, last.text) == unbroken(1, JOB, STEPS)
