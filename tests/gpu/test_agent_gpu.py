"""GPU jobs under torchmig-run print what they print under torchrun, whatever happens between."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from running import Run, by_rank, torchmig, unbroken

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(400)]
JOB = Path(__file__).with_name("multi_job.py")


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def cycles(folder, ranks, kind, steps, count, more=lambda cycle: ()):
    """Suspend and restore a job at random moments; return the texts of all its lives."""
    moments = sorted(random.Random(os.urandom(8)).sample(range(3, steps - 8), count))
    texts = []
    run = Run(folder, f"--nproc-per-node={ranks}", JOB, kind, steps)
    for cycle, moment in enumerate(moments):
        run.wait_for(rf"^rank \d+ step ({'|'.join(str(s) for s in range(moment, steps))}) ")
        texts.append(run.suspend().text)
        run = Run(folder, "--restore=latest", *more(cycle))
    texts.append(run.finish().text)
    return texts, moments


def check(texts, ranks, kind, steps, moments):
    assert by_rank(*texts) == unbroken(ranks, str(JOB), kind, str(steps)), moments


def test_one_gpu_with_workers_and_mixed_precision(tmp_path):
    texts, moments = cycles(tmp_path, 1, "gpt", 40, 2)
    check(texts, 1, "gpt", 40, moments)


def test_a_checkpoint_goes_on_and_can_be_restored(tmp_path):
    may_end = tmp_path / "may-end"
    run = Run(tmp_path, "--nproc-per-node=1", JOB, "gpt", 30, may_end)
    run.wait_for_step(8).signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
    may_end.touch()
    reference = unbroken(1, str(JOB), "gpt", "30")
    assert by_rank(run.finish().text) == reference
    again = by_rank(Run(tmp_path, "--restore=latest").finish().text)
    assert again[0]
    assert again[0] == reference[0][-len(again[0]) :]


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "groups"])
def test_two_gpus_five_cycles_at_random_moments(kind, tmp_path):
    texts, moments = cycles(tmp_path, 2, kind, 120, 5)
    check(texts, 2, kind, 120, moments)


@pytest.mark.multigpu
def test_two_gpus_swapped_and_swapped_again(tmp_path):
    texts, moments = cycles(
        tmp_path, 2, "ddp", 60, 2, lambda cycle: (f"--gpus={'1,0' if cycle == 0 else '0,1'}",)
    )
    check(texts, 2, "ddp", 60, moments)


@pytest.mark.multigpu
def test_equal_ranks_are_stored_once(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=2", JOB, "ddp", 60)
    run.wait_for_step(10).suspend()
    listed = torchmig("ls", "latest", f"--repo={tmp_path}/torchmig-repo", "--json").stdout
    gpu = [entry for entry in json.loads(listed) if entry["kind"] == "gpu-block"]
    assert [entry["rank"] for entry in gpu] == [0, 1]
    stored = sum(entry["size_bytes"] for entry in gpu) - gpu[1]["shared_bytes"]
    assert stored <= 1.1 * gpu[0]["size_bytes"]


@pytest.mark.multigpu
def test_two_jobs_are_packed_onto_one_gpu(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = Run(tmp_path / "a", "--nproc-per-node=1", JOB, "gpt", 40)
    monkeypatch.setenv("JOB_DEVICE", "1")
    second = Run(tmp_path / "b", "--nproc-per-node=1", "--master-port=29511", JOB, "gpt", 40)
    second.wait_for_step(5).suspend()
    again = Run(tmp_path / "b", "--restore=latest", "--gpus=0", "--master-port=29511").finish()
    reference = unbroken(1, str(JOB), "gpt", "40")
    assert by_rank(first.finish().text) == reference
    assert by_rank(second.text, again.text) == reference


@pytest.mark.multigpu
def test_a_collective_in_a_cuda_graph_is_refused_and_the_job_trains_on(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=2", JOB, "graph", 40)
    run.wait_for_step(5).signal(signal.SIGUSR2).wait_for("a CUDA graph holds collectives")
    assert by_rank(run.finish().text) == unbroken(2, str(JOB), "graph", "40")
