"""A group that torch splits off another one, in C++, by a job of one rank.

Torch does so for device meshes of ranks that are bound to accelerators. Here it is told that the
processor is one. (Of one rank: with several, gloo's children hang now and then, also under
torchrun.)
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
    child = split(everybody, [[0]])
    grandchild = split(child, [[0]])
    value = torch.full((1000,), 1.0 + rank)
    for step in range(STEPS):
        dist.all_reduce(value, group=child)
        dist.all_reduce(value, group=grandchild)
        value = torch.sin(value + rank)
        dist.all_reduce(value, group=everybody)
        value = torch.cos(value * 1.01)
        print(f"rank {rank} step {step} {value.double().sum().item():.12e}", flush=True)
        time.sleep(0.02)
    print(f"rank {rank} end", flush=True)


main()
