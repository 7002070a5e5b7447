"""A training on GPUs of the named kind; every loss is printed bit for bit.

    torchmig-run multi_job.py KIND[@DEVICE] STEPS [MAY_END [PAUSE [MOMENTS]]]

Kinds: ddp (and a second group, DataLoader workers, pinned memory), fsdp (FSDP2), groups (subgroups,
a device mesh, point-to-point, a group with both gloo and nccl), split (groups that NCCL splits off
others), nccl-graph (a collective in a CUDA graph, which is refused), long, heavy, and those of
gpu_job.py, for one rank. Each rank has a GPU of its own unless DEVICE names one for all. The last
steps are not taken before the file MAY_END exists, unless it is empty. After each step the job
sleeps for PAUSE seconds, by default 0.02. Rank 0 leaves in the file MOMENTS when each of its steps
was over, in seconds.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_job import GptJob, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

KIND, _, DEVICE = sys.argv[1].partition("@")
STEPS = int(sys.argv[2])
MAY_END = Path(sys.argv[3]) if sys.argv[3:] and sys.argv[3] else None
PAUSE_SECONDS = float(sys.argv[4]) if sys.argv[4:] else 0.02
MOMENTS = Path(sys.argv[5]) if sys.argv[5:] else None


class Numbers(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.randn(1024, generator=torch.Generator().manual_seed(index * 100 + self.rank))


def network():
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024))


class Ddp:
    def __init__(self, rank, device):
        dist.init_process_group("nccl", device_id=device)
        self.everybody = dist.new_group(list(range(dist.get_world_size())))
        torch.manual_seed(3)
        self.model = nn.parallel.DistributedDataParallel(network().to(device), device_ids=[device])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        loader = torch.utils.data.DataLoader(Numbers(rank), 64, num_workers=1, pin_memory=True)
        self.batches = iter(loader)
        self.device = device

    def step(self, number):
        x = next(self.batches).to(self.device, non_blocking=True)
        loss = ((self.model(x) - x) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.full((4,), float(number), device=self.device)
        dist.all_reduce(total, group=self.everybody)
        return loss.detach() + total[0]


class Fsdp:
    def __init__(self, rank, device):
        dist.init_process_group("nccl")
        torch.manual_seed(3)
        self.model = network().to(device)
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.noise = torch.Generator().manual_seed(100 + rank)
        self.device = device

    def step(self, number):
        x = torch.randn(64, 1024, generator=self.noise).to(self.device)
        loss = ((self.model(x) - x) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Groups:
    def __init__(self, rank, device):
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        world = dist.get_world_size()
        mesh = init_device_mesh("cuda", (1, world), mesh_dim_names=("data", "tensor"))
        self.tensor = mesh.get_group("tensor")
        self.alone = [dist.new_group([member]) for member in range(world)][rank]
        self.lazy = dist.new_group(list(range(world)))
        torch.manual_seed(rank)
        self.weight = torch.randn(512, 512, device=device) / 30
        self.rank, self.world, self.device = rank, world, device

    def step(self, number):
        x = torch.full((512, 512), 1.0 + number / 100, device=self.device)
        part = torch.tanh(x @ self.weight)
        dist.all_reduce(part, group=self.tensor)
        dist.all_reduce(part[:1], group=self.alone)
        received = torch.empty_like(part)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, part, (self.rank + 1) % self.world),
                dist.P2POp(dist.irecv, received, (self.rank - 1) % self.world),
            ]
        )
        for work in works:
            work.wait()
        if number % 3 == 0:
            dist.all_reduce(received, group=self.lazy)
        count = torch.tensor([number])
        dist.all_reduce(count)
        self.weight += received[:512, :512] * 1e-4
        return self.weight.sum() + count.item()


class Split:
    """Each step goes through communicators that were split off the one of all ranks."""

    def __init__(self, rank, device):
        dist.init_process_group("nccl", device_id=device)
        world = dist.get_world_size()
        self.all = dist.split_group(split_ranks=[list(range(world))])
        self.alone = dist.split_group(split_ranks=[[member] for member in range(world)])
        self.value = torch.full((512, 512), 1.0 + rank, device=device)
        self.rank = rank

    def step(self, number):
        dist.all_reduce(self.value, group=self.all)
        dist.all_reduce(self.value, group=self.alone)
        self.value = torch.sin(self.value + self.rank)
        dist.all_reduce(self.value)
        self.value = torch.cos(self.value * 1.01)
        return self.value.double().sum()


class Single:
    def __init__(self, rank, device):
        torch.manual_seed(3)
        self.job = make(KIND)

    def step(self, number):
        return self.job.step()


class Long:
    """Kernels that are longer than the turns that processes take on a shared GPU."""

    def __init__(self, rank, device):
        self.x = torch.full((1024,), 1.0 + rank, device=device)

    def step(self, number):
        self.x += 0.01
        torch.cuda._sleep(100_000_000)
        return self.x.sum()


class Heavy:
    """GPT-2 small with batches of 64, data-parallel: GPUs are what it waits for."""

    def __init__(self, rank, device):
        torch.manual_seed(3)
        self.job = GptJob(batch=64)
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("nccl", device_id=device)
            self.job.run = nn.parallel.DistributedDataParallel(self.job.model, device_ids=[device])

    def step(self, number):
        return self.job.step()


class NcclGraph:
    """A CUDA graph with a collective in it."""

    def __init__(self, rank, device):
        dist.init_process_group("nccl", device_id=device)
        self.x = torch.full((1024,), 1.0 + rank, device=device)
        dist.all_reduce(self.x.clone())
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = torch.tanh(self.x)
            dist.all_reduce(self.y)

    def step(self, number):
        self.x += 0.01
        self.graph.replay()
        return self.y.sum()


KINDS = {
    "ddp": Ddp,
    "fsdp": Fsdp,
    "groups": Groups,
    "split": Split,
    "long": Long,
    "heavy": Heavy,
    "nccl-graph": NcclGraph,
}


def main():
    rank = int(os.environ["LOCAL_RANK"])
    if DEVICE:
        # NCCL takes two ranks on one GPU for a mistake, unless they seem to be on two hosts.
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
        os.environ["NCCL_NET"] = "Socket"
    device = torch.device("cuda", int(DEVICE or rank))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    job = KINDS.get(KIND, Single)(rank, device)
    moments = []
    for number in range(STEPS):
        loss = job.step(number)
        print(f"rank {rank} step {number} {loss.item().hex()}", flush=True)
        moments.append(time.perf_counter())
        time.sleep(PAUSE_SECONDS)
        while number == STEPS - 5 and MAY_END is not None and not MAY_END.exists():
            time.sleep(0.01)
    if MOMENTS is not None and rank == 0:
        MOMENTS.write_text(json.dumps(moments))
    torch.cuda.synchronize()
    del job  # a communicator does not end before the graphs that hold its collectives
    if dist.is_initialized():
        dist.destroy_process_group()


main()
