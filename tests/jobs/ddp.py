"""DDP with dropout and one DataLoader worker a rank."""

import sys
import time
from pathlib import Path

from batches import Numbers
from lean import DataLoader, dist, nn, torch

STEPS = int(sys.argv[1])
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
# Without this file the last steps are not taken: the test decides when the job may end.
MAY_END = Path(sys.argv[3]) if len(sys.argv) > 3 else None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everybody = dist.new_group(list(range(dist.get_world_size())))
    # Before there is a model: the worker is a copy of what its rank is now.
    batches = iter(DataLoader(Numbers(rank), batch_size=8, num_workers=1))
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        batch = next(batches)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = torch.tensor([float(rank + step)])
        dist.all_reduce(total, group=everybody)
        print(f"rank {rank} step {step} {loss.item():.9e} {total.item()}", flush=True)
        time.sleep(SECONDS)
        while step == STEPS - 5 and MAY_END is not None and not MAY_END.exists():
            time.sleep(0.01)
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"rank {rank} end {weights.item():.15e}", flush=True)
    dist.destroy_process_group()


main()
