"""Makes collectives that do nothing, with the gate and without, and says what each call cost.

    LD_PRELOAD=counted.so python idle_gate.py plain|gated

Prints "ready" and waits for a line, so that a tracer can come; two getpriority() calls enclose what
is counted.
"""

import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmig import _C

CALLS = 2000


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "gated":
        _C.install_gate()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.distributed_c10d._get_default_group()
    if sys.argv[1] == "gated":
        _C.register_group(group, group.group_name, [0, 1])
    tensors = [torch.ones(1)]
    counted = ctypes.CDLL(None)

    def calls(number):
        for _ in range(number):
            group.allreduce(tensors)
            group.broadcast(tensors)
            group.send(tensors, 1, 0)

    calls(100)
    print("ready", flush=True)
    sys.stdin.readline()
    os.getpriority(os.PRIO_PROCESS, 0)
    allocations, locks = counted.counted_allocations(), counted.counted_locks()
    calls(CALLS)
    os.getppid()  # shows the tracer that it sees system calls
    allocations = counted.counted_allocations() - allocations
    locks = counted.counted_locks() - locks
    os.getpriority(os.PRIO_PROCESS, 0)
    json.dump({"calls": 3 * CALLS, "allocations": allocations, "locks": locks}, sys.stdout)
    sys.stdout.write("\n")


main()
