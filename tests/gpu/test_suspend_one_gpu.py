"""One GPU process, suspended and restored: it computes what it would have computed, bit for bit."""

from pathlib import Path

import pytest
import suspension

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 12
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("streams", {}),
        ("graph", {}),
        ("gpt", {}),
        ("oom", {}),
        ("expandable", EXPANDABLE),
        ("compile", {}),
    ],
)
def test_suspended_and_restored_is_bit_identical(kind, more, tmp_path):
    environment = suspension.job_environment(**more)
    unbroken = suspension.Job(kind, STEPS, tmp_path / "unbroken", environment).end()
    job = suspension.Job(kind, STEPS, tmp_path / "job", environment, stop=2)
    socket = tmp_path / "staging.sock"
    try:
        with suspension.new_staging(8 << 30) as staging:
            for life in range(2):
                job.wait_parked()
                assert job.ask("describe")["arena"] == ""
                images = tmp_path / f"images.{life}"
                flat = suspension.take_out(job, images, staging, socket)
                assert not Path(f"/proc/{job.pid}").exists()
                suspension.bring_back(job, images, staging, socket, flat)
                job.go(next_stop=6 if life == 0 else None)
        assert job.end() == unbroken
    finally:
        job.kill()
