"""A ring of point-to-point messages, with receives posted ahead and no collective at all."""

import sys
import time

from lean import dist, torch

STEPS = int(sys.argv[1])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    token = torch.full((1000,), float(rank))
    incoming = torch.empty(1000)
    posted = dist.irecv(incoming, left)
    for step in range(STEPS):
        sent = dist.isend(token, right)
        posted.wait()
        sent.wait()
        token = torch.sin(incoming * 1.01) + rank
        incoming = torch.empty(1000)
        if step + 1 < STEPS:
            posted = dist.irecv(incoming, left)
        print(f"rank {rank} step {step} {token.double().sum().item():.12e}", flush=True)
        time.sleep(0.01 * (rank + 1))
    print(f"rank {rank} end", flush=True)


main()
