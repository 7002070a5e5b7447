"""A job with a stretch of memory that stands in for a GPU's: gone when it is released.

Faults: copy_out and copy_in fail at their first call, "refused" uses what is refused, "waits" seems
to have NCCL. The last ten steps are made when nothing fails any more.
"""

import ctypes
import hashlib
import mmap
import os
import random
import sys
import time
import uuid
from pathlib import Path

from faults import any_fails, fails

sys.path.append(str(Path(__file__).parents[2] / "jobs"))
from descent import Descent
from lean import dist, nn, torch

from torchmig.worker import communication, device

STEPS = int(sys.argv[1])
SIZE = max(20, int(sys.argv[2]) if len(sys.argv) > 2 else 0) << 20
memory = ctypes.create_string_buffer(SIZE)
base = ctypes.addressof(memory)
rank = int(os.environ["LOCAL_RANK"])
blocks = [
    (rank, base, 5 << 20),
    (rank, base + (6 << 20), 100),
    (rank, base + (7 << 20), SIZE - (11 << 20)),
]
failed = set()


def copy(out, staging, pieces):
    what = "copy_out" if out else "copy_in"
    if fails(what) and what not in failed:
        failed.add(what)
        raise RuntimeError("the stand-in does not copy")
    fd = device._receive(staging)
    with mmap.mmap(fd, os.fstat(fd).st_size) as mapped:
        for _device, address, size, offset in pieces:
            if out:
                mapped[offset : offset + size] = ctypes.string_at(address, size)
            else:
                ctypes.memmove(address, mapped[offset : offset + size], size)
    os.close(fd)


def release():
    ctypes.memset(base, 0, SIZE)
    return SIZE


def describe():
    own = {"device": rank, "uuid": str(uuid.UUID(int=rank + 1)), "name": "STAND-IN"}
    own |= {"live_bytes": SIZE, "reserved_bytes": SIZE}
    return {
        "devices": [own],
        "visible": [str(uuid.UUID(int=number)) for number in (1, 2)],
        "arena": "",
    }


communication.waits_on_gpus = lambda: fails("waits")
device.in_use = lambda: True
device.settle = lambda: None
device.refused = lambda: ["it uses managed memory"] if fails("refused") else []
device.describe = describe
device.live_blocks = lambda: blocks
device.copy = copy
device.release = release
device.regain = device.close_nvml = device.reopen_nvml = lambda: None


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    noise = random.Random(7).randbytes(SIZE)
    ctypes.memmove(base, noise, SIZE)
    layer = nn.Linear(8, 8)
    optimizer = Descent(layer.parameters())
    for number in range(STEPS):
        layer(torch.ones(8)).sum().backward()
        optimizer.step()
        for _device, address, _size in blocks:
            ctypes.memset(address + number, (number * 7 + rank) % 256, 64)
        found = hashlib.sha256(b"".join(ctypes.string_at(a, n) for _, a, n in blocks)).hexdigest()
        weights = layer.weight.sum().item()
        print(f"rank {rank} step {number} {found[:16]} {weights:.9e}", flush=True)
        time.sleep(0.05)
        while number == STEPS - 10 and any_fails():
            time.sleep(0.05)
    dist.destroy_process_group()


main()
