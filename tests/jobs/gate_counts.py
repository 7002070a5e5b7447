"""Issues collectives in every way that torch offers, and prints what the gate has counted."""

import json
import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmig import _C
from torchmig.worker import groups

counts = {}


def counted(name, issue):
    before = _C.counters()
    issue()
    after = _C.counters()
    counts[name] = {
        key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)
    }


def main():
    _C.install_gate()
    groups.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    pair = dist.new_group([0, 2])
    x = torch.ones(4)
    big = torch.ones(16)
    counted("all_reduce", lambda: dist.all_reduce(x))
    counted("async", lambda: dist.all_reduce(x, group=pair, async_op=True))
    counted("broadcast", lambda: dist.broadcast(x, 0))
    counted("reduce", lambda: dist.reduce(x, 0))
    counted("all_gather", lambda: dist.all_gather([torch.ones(4) for _ in range(4)], x))
    counted("all_gather_into", lambda: dist.all_gather_into_tensor(big, x))
    counted("reduce_scatter", lambda: dist.reduce_scatter_tensor(x, big))
    counted("all_to_all", lambda: dist.all_to_all_single(big, torch.ones(16)))
    counted("barrier", dist.barrier)
    counted("send", lambda: dist.send(x, 2))
    counted("recv", lambda: dist.recv(x, 2, tag=7))
    counted("group_send", lambda: dist.send(x, group=pair, group_dst=1))
    counted("functional", lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 0)

    counted("new_group", lambda: dist.new_group([0, 1]))
    counted("new_local_group", lambda: dist.new_group([0, 2], use_local_synchronization=True))
    # torch sends away who is no member: this rank takes no part in what the others do.
    counted("others_group", lambda: dist.new_group([1, 3], use_local_synchronization=True))

    def inference():
        with torch.inference_mode():
            dist.all_reduce(torch.ones(4))

    counted("inference", inference)

    def from_thread():
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
        thread.start()
        thread.join()

    counted("thread", from_thread)

    print(
        json.dumps(
            {"counts": counts, "typed": _C.typed_operations(), "boxed": _C.boxed_operations()}
        )
    )


main()
