"""What no checkpoint could keep is refused by name before anything is frozen; the job trains on."""

import importlib.util
import signal
from pathlib import Path

import pytest
from c_library import build
from running import Run, by_rank, snapshots, unbroken

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(300)]

JOB = Path(__file__).with_name("refused_job.py")
STEPS = "200"
REASONS = {
    "managed": "it uses managed memory",
    "shared": "it shares CUDA memory with other processes",
    "stream-ordered": "it uses backend:cudaMallocAsync",
    "profiled": "a profiler has used CUPTI",
    "profiled-once": "a profiler has used CUPTI",
    "symmetric": "it makes memory for NCCL windows, symmetric memory or NVSHMEM",
    "communicator": "has an NCCL communicator .* that torch.distributed has not made",
}
MANAGED = """
#include <stddef.h>
int cudaMallocManaged(void**, size_t, unsigned);
int make_managed(void** out, size_t size) { return cudaMallocManaged(out, size, 1); }
"""


def library(folder):
    """Build what calls the CUDA runtime that torch has brought along."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    runtimes = [*torch.glob("lib/libcudart*.so*"), *torch.parent.glob("nvidia/**/libcudart.so*")]
    return build(folder / "managed.so", MANAGED, runtimes[0])


def refused(folder, kind, ranks, *options, more=()):
    run = Run(folder, f"--nproc-per-node={ranks}", *options, JOB, kind, STEPS, *more)
    run.wait_for_step(5)
    said = rf"withdrawn, the job goes on: .*{REASONS[kind]}"
    for count, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), 1):
        run.signal(number).wait_for(rf"({said}[^$]*){{{count}}}")
    run.finish()
    assert "Traceback" not in run.errors
    assert by_rank(run.text) == unbroken(ranks, str(JOB), "nothing", STEPS)
    assert snapshots(folder) == []


def test_managed_memory(tmp_path):
    refused(tmp_path, "managed", 1, more=(library(tmp_path),))


def test_shared_memory_without_an_arena(tmp_path):
    refused(tmp_path, "shared", 1, "--no-arena")


def test_memory_of_the_arena_cannot_be_shared(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=1", JOB, "shared", STEPS)
    assert run.wait() == 1
    assert "CUDA tensors cannot be shared with other processes from the arena" in run.errors


def test_stream_ordered_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    refused(tmp_path, "stream-ordered", 1)


@pytest.mark.parametrize("kind", ["profiled", "profiled-once", "symmetric"])
def test_one_gpu(kind, tmp_path):
    refused(tmp_path, kind, 1)


@pytest.mark.parametrize("kind", ["profiled", "profiled-once"])
def test_profilers_without_cupti_are_no_obstacle(kind, tmp_path):
    run = Run(tmp_path, "--nproc-per-node=1", "--no-cupti", JOB, kind, STEPS)
    run.wait_for_step(5).suspend()
    again = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == unbroken(1, str(JOB), "nothing", STEPS)


@pytest.mark.multigpu
def test_a_communicator_that_torch_has_not_made(tmp_path):
    refused(tmp_path, "communicator", 2)
