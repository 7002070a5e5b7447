"""GPU jobs under torchmig-run print what they print under torchrun, whatever happens between."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from running import Run, by_rank, torchmig, unbroken

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(420)]
JOB = Path(__file__).with_name("multi_job.py")
CYCLES = 5
STAGING = "--staging=4G"


def cycles(folder, ranks, kind, steps, count, more=lambda cycle: (), pause="0.02"):
    """Suspend and restore a job at random moments; return the texts of all its lives.

    A moment is a number of lines that a life has printed.
    """
    most = steps // count // 3
    moments = [random.Random(os.urandom(8)).randint(1, most) for _ in range(count)]
    texts = []
    may_end = folder / "may-end"
    run = Run(folder, f"--nproc-per-node={ranks}", STAGING, JOB, kind, steps, may_end, pause)
    for cycle, moment in enumerate(moments):
        run.wait_for(rf"(^rank \d+ step .*\s){{{moment}}}")
        texts.append(run.suspend().text)
        run = Run(folder, "--restore=latest", STAGING, *more(cycle))
    may_end.touch()
    texts.append(run.finish().text)
    return texts, moments


def check(texts, ranks, kind, steps, moments):
    assert by_rank(*texts) == unbroken(ranks, str(JOB), kind, str(steps)), moments


@pytest.mark.parametrize("kind", ["gpt", "compile", "graph", "streams", "oom", "expandable"])
def test_one_gpu_five_cycles_at_random_moments(kind, tmp_path, monkeypatch):
    if kind == "expandable":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # A replayed graph passes no boundary of a step: it takes seconds until it stands elsewhere.
    steps, pause = (100, "0.5") if kind == "graph" else (60, "0.02")
    texts, moments = cycles(tmp_path, 1, kind, steps, CYCLES, pause=pause)
    check(texts, 1, kind, steps, moments)


@pytest.mark.parametrize("kind", ["ddp@0", "fsdp@0", "groups@0"])
def test_ranks_that_wait_for_each_other_on_one_gpu_are_refused_and_train_on(kind, tmp_path):
    run = Run(tmp_path, "--nproc-per-node=2", STAGING, JOB, kind, 40)
    run.wait_for_step(5).signal(signal.SIGUSR1)
    run.wait_for("withdrawn, the job goes on: rank 0: GPU 0 is shared with process")
    assert by_rank(run.finish().text) == unbroken(2, str(JOB), kind, "40")


def test_a_checkpoint_goes_on_and_can_be_restored(tmp_path):
    may_end = tmp_path / "may-end"
    run = Run(tmp_path, "--nproc-per-node=1", STAGING, JOB, "gpt", 30, may_end)
    run.wait_for_step(8).signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
    may_end.touch()
    reference = unbroken(1, str(JOB), "gpt", "30")
    assert by_rank(run.finish().text) == reference
    again = by_rank(Run(tmp_path, "--restore=latest", STAGING).finish().text)
    assert again[0]
    assert again[0] == reference[0][-len(again[0]) :]


def test_staging_smaller_than_the_memory_is_gone_through(tmp_path):
    small = "--staging=256M"
    run = Run(tmp_path, "--nproc-per-node=1", small, JOB, "gpt", 40).wait_for_step(8).suspend()
    assert "more than staging holds" in run.errors
    again = Run(tmp_path, small, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == unbroken(1, str(JOB), "gpt", "40")


def test_a_job_without_an_arena_is_the_drivers_to_save(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=1", "--no-arena", JOB, "streams", 60)
    run.wait_for_step(8).suspend()
    again = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == unbroken(1, str(JOB), "streams", "60")


def test_two_jobs_share_a_gpu_and_come_back_to_it_together(tmp_path):
    folders = first, second = tmp_path / "a", tmp_path / "b"
    may_end = tmp_path / "may-end"
    lives = {}
    for folder in folders:
        folder.mkdir()
        lives[folder] = [Run(folder, "--nproc-per-node=1", STAGING, JOB, "gpt", 40, may_end)]
    for folder in folders:
        lives[folder][0].wait_for_step(5)
    # One goes and comes back beside the other; then both go, and both come back at once.
    lives[second][0].suspend()
    lives[second].append(Run(second, "--restore=latest", STAGING).wait_for("restored from"))
    lives[first][0].suspend()
    lives[second][1].suspend()
    for folder in folders:
        lives[folder].append(Run(folder, "--restore=latest", STAGING))
    may_end.touch()
    for folder in folders:
        lives[folder][-1].finish()
        texts = [run.text for run in lives[folder]]
        assert by_rank(*texts) == unbroken(1, str(JOB), "gpt", "40")


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "groups", "split"])
def test_two_gpus_five_cycles_at_random_moments(kind, tmp_path):
    texts, moments = cycles(tmp_path, 2, kind, 120, CYCLES)
    check(texts, 2, kind, 120, moments)


@pytest.mark.multigpu
def test_two_gpus_swapped_and_swapped_again(tmp_path):
    texts, moments = cycles(
        tmp_path, 2, "ddp", 60, 2, lambda cycle: (f"--gpus={'1,0' if cycle == 0 else '0,1'}",)
    )
    check(texts, 2, "ddp", 60, moments)


@pytest.mark.multigpu
@pytest.mark.parametrize(("ranks", "kind", "gpus"), [(1, "gpt", [1]), (2, "ddp", [1, 0])])
def test_a_running_job_migrates(ranks, kind, gpus, tmp_path):
    may_end, job = tmp_path / "may-end", f"moves-{kind}"
    first = Run(
        tmp_path, f"--nproc-per-node={ranks}", f"--job={job}", STAGING, JOB, kind, 60, may_end
    ).wait_for_step(8)
    used = f"--gpus={','.join(map(str, gpus))}"
    second = Run(tmp_path, "migrate", job, used, program="torchmig")
    assert first.wait() == 85, first.errors
    second.wait_for("restored from snapshot")
    (status,) = (s for s in json.loads(torchmig("ps", "--json").stdout) if s["job"] == job)
    assert sorted(gpu["index"] for gpu in status["gpus"]) == sorted(gpus)
    may_end.touch()
    lines = second.finish().text.split("\n", 1)[1]  # the first one is the verb's own
    assert by_rank(first.text, lines) == unbroken(ranks, str(JOB), kind, "60")


@pytest.mark.multigpu
def test_equal_ranks_are_stored_once(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=2", STAGING, JOB, "ddp", 60)
    run.wait_for_step(10).suspend()
    listed = torchmig("ls", "latest", f"--repo={tmp_path}/torchmig-repo", "--json").stdout
    gpu = [entry for entry in json.loads(listed) if entry["kind"] == "gpu-block"]
    assert [entry["rank"] for entry in gpu] == [0, 1]
    stored = sum(entry["size_bytes"] for entry in gpu) - gpu[1]["shared_bytes"]
    assert stored <= 1.1 * gpu[0]["size_bytes"]


@pytest.mark.multigpu
def test_two_jobs_are_packed_onto_one_gpu(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = Run(tmp_path / "a", "--nproc-per-node=1", JOB, "gpt", 40)
    second = Run(tmp_path / "b", "--nproc-per-node=1", JOB, "gpt@1", 40)
    second.wait_for_step(5).suspend()
    again = Run(tmp_path / "b", "--restore=latest", "--gpus=0").finish()
    reference = unbroken(1, str(JOB), "gpt", "40")
    assert by_rank(first.finish().text) == reference
    assert by_rank(second.text, again.text) == reference


@pytest.mark.multigpu
def test_a_collective_in_a_cuda_graph_is_refused_and_the_job_trains_on(tmp_path):
    may_end = tmp_path / "may-end"
    run = Run(tmp_path, "--nproc-per-node=2", JOB, "nccl-graph", 40, may_end)
    run.wait_for_step(5).signal(signal.SIGUSR2).wait_for("a CUDA graph holds collectives")
    may_end.touch()
    assert by_rank(run.finish().text) == unbroken(2, str(JOB), "nccl-graph", "40")
