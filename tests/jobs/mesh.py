"""A 2x2 mesh: rows and columns are used unevenly, asynchronous works are held for some steps."""

import sys
import time

from lean import dist, torch
from torch.distributed.device_mesh import init_device_mesh

STEPS = int(sys.argv[1])


def functional_sum(state, group):
    """Return the sum as functional collectives make it, which find the group by its name."""
    operations = torch.ops._c10d_functional
    return operations.wait_tensor(operations.all_reduce(state, "sum", group.group_name))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    row, column = mesh.get_group("row"), mesh.get_group("column")
    state = torch.full((16,), float(rank + 1))
    held = []
    for step in range(STEPS):
        for _ in range(1 + step % 3):
            dist.all_reduce(state, group=row)
            state = torch.sin(state) + rank
        state = torch.sin(functional_sum(state, column))
        if step % 2 == 0:
            late = state.clone()
            held.append((late, dist.all_reduce(late, group=column, async_op=True)))
        if len(held) > 3:
            late, work = held.pop(0)
            work.wait()
            state = state + 0.01 * torch.cos(late)
        print(f"rank {rank} step {step} {state.double().sum().item():.12e}", flush=True)
        time.sleep(0.01 * (1 + rank % 2))
    for late, work in held:
        work.wait()
        state = state + late
    print(f"rank {rank} end {state.double().sum().item():.15e}", flush=True)
    dist.destroy_process_group()


main()
