"""A training on GPUs that holds something of the named kind, which no checkpoint could keep.

    torchmig-run refused_job.py KIND STEPS [LIBRARY]

Kinds: managed (memory from LIBRARY), shared (a tensor shared with other processes), stream-ordered
(the allocator that the environment names), profiled (all along), profiled-once (on the CPU, before
the first step), symmetric (memory for symmetric kernels), communicator (of NCCL, made by hand),
nothing.
"""

import ctypes
import os
import sys
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn

KIND, STEPS = sys.argv[1], int(sys.argv[2])


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def managed(library):
    address = ctypes.c_void_p()
    assert ctypes.CDLL(library).make_managed(ctypes.byref(address), 1 << 20) == 0
    return address


def shared():
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.ones(1 << 20, device="cuda")
    return tensor, reduce_tensor(tensor)


def profiled(held):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    held.enter_context(torch.profiler.profile(activities=activities))


def profiled_once():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return torch.ones(8, device="cuda").sum().item()


def symmetric():
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(1 << 20, device=torch.device("cuda", 0))


def communicator(rank, world_size):
    """Have a communicator that torch.distributed knows nothing of."""
    nccl = ctypes.CDLL("libnccl.so.2")
    unique = UniqueId()
    if rank == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    told = [bytes(unique)]
    dist.broadcast_object_list(told)
    handle = ctypes.c_void_p()
    unique = UniqueId.from_buffer_copy(told[0])
    assert nccl.ncclCommInitRank(ctypes.byref(handle), world_size, unique, rank) == 0
    return handle


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with ExitStack() as held:
        keeps = {
            "managed": lambda: managed(sys.argv[3]),
            "shared": shared,
            "stream-ordered": lambda: None,
            "profiled": lambda: profiled(held),
            "profiled-once": profiled_once,
            "symmetric": symmetric,
            "communicator": lambda: communicator(rank, world_size),
            "nothing": lambda: None,
        }[KIND]()
        torch.manual_seed(3)
        model = nn.Linear(256, 256).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        noise = torch.Generator().manual_seed(100 + rank)
        for step in range(STEPS):
            x = torch.randn(64, 256, generator=noise).to(device)
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {rank} step {step} {loss.item().hex()}", flush=True)
            time.sleep(0.05)
    del keeps
    print(f"rank {rank} end", flush=True)


main()
