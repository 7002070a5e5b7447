"""Ranks that are busy when the request comes; the first argument says with what, in what order."""

import ctypes
import errno
import os
import sys
import time

from lean import DataLoader, Dataset, dist, nn, torch

MODES = sys.argv[1].split(",")
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


def busy(rank, mode):
    print(f"rank {rank} is busy: {mode}", flush=True)


def collective(rank, total):
    if rank == 1:
        busy(rank, "collective")
        time.sleep(SECONDS)
    dist.all_reduce(total)


def native(rank, _total):
    if rank == 0:
        busy(rank, "native")
        wait_in_native_code(SECONDS)


def sleep(rank, _total):
    busy(rank, "sleep")
    time.sleep(SECONDS)


def backward(rank, total):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    loss = model(total).sum()
    if rank == 0:
        loss = SlowBackward.apply(loss)
        busy(rank, "backward")
    loss.backward()
    total += model.module.weight.grad.sum()
    # Model and loss go before their group does: torch may abort at the exit of the interpreter.


def loader(rank, total):
    busy(rank, "loader")
    for batch in DataLoader(SlowStart(), batch_size=4, num_workers=1):
        total += batch.sum()
        dist.all_reduce(total)


TOGETHER = {mode.__name__: mode for mode in (collective, native, sleep, backward, loader)}


def main():
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    if "before" in MODES and rank == 0:
        busy(rank, "before")
        time.sleep(SECONDS)
    dist.init_process_group("gloo")
    total = torch.ones(4) * (rank + 1)
    for mode in MODES:
        dist.all_reduce(total)  # whoever waited for the mode before is stopped here at the latest
        if mode in TOGETHER:
            TOGETHER[mode](rank, total)
    dist.all_reduce(total)
    dist.destroy_process_group()
    if "after" in MODES:
        busy(rank, "after")
        time.sleep(SECONDS)
    if "peer-ended" in MODES and rank == 0:
        time.sleep(SECONDS / 2)  # the peer's interpreter is gone by then
        busy(rank, "peer-ended")
        time.sleep(SECONDS)
    print(f"rank {rank} end {total.sum().item()}", flush=True)


main()
