"""Two GPUs that NVML would show on a host that has none.

With the fault "memory" they have no room, with "shared" everybody uses them.
"""

from pathlib import Path

from faults import fails

from torchmig.capture.device import gpus


def gpu(index):
    free = 1 << 20 if fails("memory") else 1 << 40
    everybody = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    pids = tuple(sorted(everybody)) if fails("shared") else ()
    return gpus.Gpu(index, f"GPU-{index + 1:032x}", "STAND-IN", 1 << 40, free, (9, 0), pids)


gpus.list_gpus = lambda: [gpu(0), gpu(1)]
gpus.driver_version = lambda: "580.0"
