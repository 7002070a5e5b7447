"""Times collectives that do nothing, so that what is left is the way to them.

torch's fake process group takes every call and moves no byte: the difference between torchrun and
torchmig-run is the gate.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

CALLS = 10_000
ROUNDS = 15


def main() -> None:
    """Print the time of one call in the quietest round, in microseconds, as JSON."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.zeros(1)
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        rounds.append((time.perf_counter() - begun) / CALLS * 1e6)
    json.dump({"microseconds": min(rounds), "rounds": rounds}, sys.stdout)
    sys.stdout.write("\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
