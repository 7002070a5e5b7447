"""Ranks that destroy their process group one by one, when they are told, and go on without it."""

import sys
import time
from pathlib import Path

from lean import dist, torch

# A rank leaves when this folder has a file leave-RANK, and all end when it has a file end.
ORDERS = Path(sys.argv[1]) if len(sys.argv) > 1 else None


def wait_for(order):
    while ORDERS is not None and not (ORDERS / order).exists():
        time.sleep(0.01)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.ones(4) * (rank + 1)
    dist.all_reduce(total)
    wait_for(f"leave-{rank}")
    dist.destroy_process_group()
    print(f"rank {rank} has left", flush=True)
    wait_for("end")
    print(f"rank {rank} end {total.sum().item()}", flush=True)


main()
