"""What the idle gate adds to a collective: the same calls with and without it, in pairs of runs.

usage: python -m benchmarks.bench_gate [--pairs N]

The backend is torch's fake one, which does nothing, so that the call itself is what is measured.
Each process gives the median of many batches; the result is the median over the pairs.
"""

import argparse
import statistics
import subprocess
import sys
import time

BATCHES = 60
CALLS = 2000


def measure(gated: bool) -> float:
    """Return seconds a call: the median over batches."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from torchmig import _C

    torch.set_num_threads(1)
    if gated:
        _C.install_gate()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.distributed_c10d._get_default_group()
    if gated:
        _C.register_group(group, group.group_name, [0, 1])
    tensors = [torch.ones(1)]
    batches = []
    for _ in range(BATCHES):
        begun = time.perf_counter()
        for _ in range(CALLS):
            group.allreduce(tensors)
        batches.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(batches)


def main() -> None:
    """Measure in pairs and print the difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--one", choices=["plain", "gated"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one == "gated"))
        return
    added = []
    for _ in range(options.pairs):
        plain, gated = (
            float(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.bench_gate", f"--one={kind}"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for kind in ("plain", "gated")
        )
        added.append(gated - plain)
        print(f"plain {plain * 1e6:.3f} us, with the gate {gated * 1e6:.3f} us a call")
    print(f"the gate adds {statistics.median(added) * 1e6:.3f} us a call (median of pairs)")


if __name__ == "__main__":
    main()
