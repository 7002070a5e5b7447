"""torchmig-run on a host without GPUs, with a stand-in for the driver's calls and for NVML.

STAND_IN_FAULT names a step that is refused: lock, checkpoint, staging, memory; or is "shared":
every other process of this host seems to use the GPUs as well.
"""

import sys

from devices import FAULT

from torchmig.agent import gpu as rank_gpu
from torchmig.agent import node
from torchmig.agent.main import main
from torchmig.capture.device import driver
from torchmig.capture.device.driver import DriverError, ProcessState

# What CRIU restores is as it was dumped: with its GPU state in its own memory.
unknown = ProcessState.CHECKPOINTED if "--restore" in " ".join(sys.argv) else ProcessState.RUNNING
states = {}


def step(name, before, after):
    def take(pid, *rest):
        assert driver.state(pid) is before, (name, driver.state(pid))
        if name == FAULT:
            raise DriverError(name, pid, "CUDA_ERROR_STAND_IN")
        states[pid] = after
        if rest and rest[0]:
            print(f"stand-in: {name} {rest[0]}", file=sys.stderr)

    return take


driver.state = lambda pid: states.get(pid, unknown)
driver.lock = step("lock", ProcessState.RUNNING, ProcessState.LOCKED)
driver.checkpoint = step("checkpoint", ProcessState.LOCKED, ProcessState.CHECKPOINTED)
driver.restore = step("restore", ProcessState.CHECKPOINTED, ProcessState.LOCKED)
driver.unlock = step("unlock", ProcessState.LOCKED, ProcessState.RUNNING)

node._uses_gpu = lambda _pid: True
if FAULT == "staging":
    rank_gpu.available_bytes = lambda: 0

sys.exit(main())
