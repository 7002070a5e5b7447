"""torch.compile on the CPU under DDP."""

import sys
import time

from lean import dist, nn, torch

STEPS = int(sys.argv[1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    torch.set_num_threads(1)
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = torch.compile(nn.parallel.DistributedDataParallel(layers))
    optimizer = torch.optim.AdamW(layers.parameters())
    noise = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        batch = torch.randn(8, 32, generator=noise)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} {loss.item():.9e}", flush=True)
        time.sleep(0.02)
    print(f"rank {rank} end", flush=True)
    dist.destroy_process_group()


main()
