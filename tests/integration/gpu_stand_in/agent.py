"""torchmig-run on a host without GPUs, with a stand-in for the driver's calls and for NVML.

Faults: a step of the driver is refused (lock, checkpoint), there is no memory for staging, loaders
are killed as soon as they have been started (loader: the first one, loaders: all), and those of
devices.py.
"""

import sys

import devices  # noqa: F401 - becomes this host's
from faults import fails

from torchmig.agent import loader, node
from torchmig.agent.entry import main
from torchmig.capture.device import driver, staging
from torchmig.capture.device.driver import DriverError, ProcessState

# What CRIU restores is as it was dumped: with its GPU state in its own memory.
unknown = ProcessState.CHECKPOINTED if "--restore" in " ".join(sys.argv) else ProcessState.RUNNING
states = {}


def step(name, before, after):
    def take(pid, *rest):
        assert driver.state(pid) is before, (name, driver.state(pid))
        if fails(name):
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
available_bytes = staging.available_bytes
staging.available_bytes = lambda: 0 if fails("staging") else available_bytes()
touched_bytes = staging.Staging.touched_bytes.fget
staging.Staging.touched_bytes = property(lambda s: 0 if fails("staging") else touched_bytes(s))


class Popen(loader.subprocess.Popen):
    killed = False

    def __init__(self, args, **options):
        super().__init__(args, **options)
        if loader.PROCESS in args and fails("loaders" if Popen.killed else "loader"):
            self.kill()
            Popen.killed = True


loader.subprocess.Popen = Popen

sys.exit(main())
