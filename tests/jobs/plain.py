"""Data parallel training by hand: as ddp.py without what DDP and torch's optimizers bring along."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from descent import Descent
from torch import nn

STEPS = int(sys.argv[1])
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 0
# Without this file the last steps are not taken: the test decides when the job may end.
MAY_END = Path(sys.argv[3]) if len(sys.argv) > 3 else None


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64))
    optimizer = Descent(model.parameters())
    noise = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        batch = torch.randn(8, 64, generator=noise)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        print(f"rank {rank} step {step} {loss.item():.9e}", flush=True)
        time.sleep(SECONDS)
        while step == STEPS - 5 and MAY_END is not None and not MAY_END.exists():
            time.sleep(0.01)
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"rank {rank} end {weights.item():.15e}", flush=True)
    dist.destroy_process_group()


main()
