"""FSDP2 over gloo."""

import sys
import time

from lean import dist, nn, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(sys.argv[1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        batch = torch.randn(8, 64, generator=noise)
        loss = ((model(batch) - batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} {loss.item():.9e}", flush=True)
        time.sleep(0.02)
    local = sum(parameter.to_local().double().sum() for parameter in model.parameters())
    print(f"rank {rank} end {local.item():.15e}", flush=True)
    dist.destroy_process_group()


main()
