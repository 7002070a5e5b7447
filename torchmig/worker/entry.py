"""Puts the gate, the hooks and the control thread into the process of a rank."""

import atexit
import os
import signal
import threading
from types import FrameType

from torchmig import _C
from torchmig.worker import backends, graphs, groups, phases, rendezvous, steps

__all__ = ["enter", "phases"]  # phases: loaded here, since the control thread must not import

# The agent's request pokes the main thread with this signal when nothing else stops it. Real-time
# signals are what scripts and libraries use least.
INTERRUPT = signal.SIGRTMAX - 1


def enter(socket_path: str) -> None:
    """Install everything; once per process.

    Raises:
        RuntimeError: The agent cannot be reached at `socket_path`.
    """
    _C.install_gate()
    _C.install_fork_hook()
    _C.install_fork_cuda()
    rendezvous.install()
    groups.install()
    backends.install()
    steps.install()
    graphs.install()
    if threading.current_thread() is threading.main_thread():
        signal.signal(INTERRUPT, _interrupted)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    _C.start_control(socket_path, rank, world_size, int(INTERRUPT))
    atexit.register(_C.control_ended)


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    _C.python_point()
