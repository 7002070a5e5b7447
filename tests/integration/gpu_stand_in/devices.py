"""Two GPUs that NVML would show on a host that has none; both have no room with FAULT memory."""

import os

from torchmig.capture.device import gpus

FAULT = os.environ.get("STAND_IN_FAULT", "")


def gpu(index):
    free = 1 << 20 if FAULT == "memory" else 1 << 40
    return gpus.Gpu(index, f"GPU-{index + 1:032x}", "STAND-IN", 1 << 40, free, (9, 0), ())


gpus.list_gpus = lambda: [gpu(0), gpu(1)]
gpus.driver_version = lambda: "580.0"
