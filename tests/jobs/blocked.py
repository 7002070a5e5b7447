"""Ranks that are busy when the request comes; the first argument says with what."""

import ctypes
import errno
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

MODE = sys.argv[1]
SECONDS = float(sys.argv[2])


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(SECONDS)
        return gradient


class SlowStart(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(SECONDS if index == 0 else 0)
        return torch.full((4,), float(index))


def wait_in_native_code(seconds):
    """Wait where no signal brings the thread back to Python: for a mutex that is never given."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    assert libc.pthread_mutex_lock(mutex) == 0
    until = (ctypes.c_long * 2)(int(time.time() + seconds), 0)
    assert libc.pthread_mutex_timedlock(mutex, until) == errno.ETIMEDOUT


def busy(rank):
    print(f"rank {rank} is busy", flush=True)


def main():
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    if MODE == "before" and rank == 0:
        busy(rank)
        time.sleep(SECONDS)
    dist.init_process_group("gloo")
    total = torch.ones(4) * (rank + 1)
    dist.all_reduce(total)
    if MODE == "collective":
        if rank == 1:
            busy(rank)
            time.sleep(SECONDS)
        dist.all_reduce(total)
    elif MODE == "native":
        if rank == 0:
            busy(rank)
            wait_in_native_code(SECONDS)
    elif MODE == "sleep":
        busy(rank)
        time.sleep(SECONDS)
    elif MODE == "backward":
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        loss = model(total).sum()
        if rank == 0:
            loss = SlowBackward.apply(loss)
            busy(rank)
        loss.backward()
        total += model.module.weight.grad.sum()
        del model, loss  # before their group goes: torch may abort at the exit of the interpreter
    elif MODE == "loader":
        busy(rank)
        for batch in DataLoader(SlowStart(), batch_size=4, num_workers=1):
            total += batch.sum()
            dist.all_reduce(total)
    elif MODE == "peer-ended":
        dist.destroy_process_group()
        if rank == 1:
            print(f"rank {rank} end {total.sum().item()}", flush=True)
            return
        time.sleep(SECONDS / 2)  # the peer's interpreter is gone by then
        busy(rank)
        time.sleep(SECONDS)
    if MODE != "peer-ended":
        dist.all_reduce(total)
        dist.destroy_process_group()
    if MODE == "after":
        busy(rank)
        time.sleep(SECONDS)
    print(f"rank {rank} end {total.sum().item()}", flush=True)


main()
