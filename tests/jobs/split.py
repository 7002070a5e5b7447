"""Groups that torch splits off another one, in C++: one of both ranks, and one for each of them.

Torch does so for device meshes of ranks that are bound to accelerators. Here it is told that the
processor is one. (Gloo's children that do not have the same members get into each other's way: with
torch 2.13 every other run fails.)
"""

import sys
import time

from lean import dist, torch

STEPS = int(sys.argv[1])
CPU = torch.device("cpu")


def split(parent, members):
    # By default torch copies the parent's options, which gloo's cannot stand.
    options = parent._get_backend(CPU).options
    return dist.split_group(parent, members, pg_options=options)


def main():
    torch.accelerator.is_available = lambda *_, **__: True
    torch.accelerator.current_accelerator = lambda *_, **__: CPU
    dist.init_process_group("gloo")
    everybody = dist.group.WORLD
    everybody.bound_device_id = torch.device("cpu:0")
    rank = dist.get_rank()
    both = split(everybody, [[0, 1]])
    alone = split(everybody, [[0], [1]])
    value = torch.full((1000,), 1.0 + rank)
    for step in range(STEPS):
        dist.all_reduce(value, group=both)
        dist.all_reduce(value, group=alone)
        value = torch.sin(value + rank)
        dist.all_reduce(value, group=everybody)
        value = torch.cos(value * 1.01)
        print(f"rank {rank} step {step} {value.double().sum().item():.12e}", flush=True)
        time.sleep(0.02)
    print(f"rank {rank} end", flush=True)


main()
