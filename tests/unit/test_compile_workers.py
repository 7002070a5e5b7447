"""The processes that compile kernels beside a rank end before it is taken from its GPU."""

import os
import time
from pathlib import Path

import pytest
import torch._inductor.config as config
from torch._inductor import async_compile

from torchmig.worker import device


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(device, "in_use", lambda: True)
    with config.patch(compile_threads=2, worker_start_method="subprocess"):
        yield async_compile.AsyncCompile.process_pool
        async_compile.shutdown_compile_workers()


def test_they_end_and_new_ones_start_when_something_is_compiled(pool):
    old = pool()
    worker = old.submit(os.getpid).result(timeout=60)
    device.end_compile_workers()
    assert old.process.poll() is not None
    assert not Path(f"/proc/{worker}").exists()
    assert pool() is not old
    assert pool().submit(os.getpid).result(timeout=60) not in (worker, os.getpid())


def test_one_that_is_at_work_is_not_ended(pool):
    future = pool().submit(time.sleep, 1)
    with pytest.raises(RuntimeError, match="being compiled in the background"):
        device.end_compile_workers()
    assert future.result(timeout=60) is None
