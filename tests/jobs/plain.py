"""Data parallel training by hand: as ddp.py without what DDP and torch's optimizers bring along.

LOADER_WORKERS=1 has the batches made by a DataLoader worker; they are the same.
"""

import os
import sys
import time
from pathlib import Path

from batches import Numbers
from descent import Descent
from lean import DataLoader, dist, nn, torch

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
    workers = int(os.environ.get("LOADER_WORKERS", "0"))
    batches = iter(DataLoader(Numbers(rank), batch_size=8, num_workers=workers))
    for step in range(STEPS):
        batch = next(batches)
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
