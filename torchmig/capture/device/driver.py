"""The driver's checkpoint of other processes, through libcuda.

Per process: running -> locked -> checkpointed, and back. A job is taken through together: locked
all before the first is checkpointed, restored all before the first is unlocked, since a rank that
waits for another's GPU would never come to rest.
"""

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Any
from uuid import UUID

from torchmig.errors import HostUnfitError, TorchmigError, UsageError
from torchmig.together import attempts, together

log = logging.getLogger(__name__)

LOCK_TIMEOUT_SECONDS = 20.0
_SUCCESS = 0
_INVALID_VALUE = 1
_NOT_INITIALIZED = 3
_NOT_SUPPORTED = 801


class ProcessState(IntEnum):
    """Where the driver has a process; the numbers are the driver's."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class DriverError(TorchmigError):
    """The driver refused a step for a process."""

    def __init__(self, step: str, pid: int, reason: str, code: int = 0) -> None:
        super().__init__(f"the driver cannot {step} process {pid}: {reason}")
        self.pid = pid
        self.reason = reason
        self.code = code


class _LockArgs(ctypes.Structure):
    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class _GpuPair(ctypes.Structure):
    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class _RestoreArgs(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.POINTER(_GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (52 - ctypes.sizeof(ctypes.c_void_p))),
        ("reserved1", ctypes.c_uint64),
    )


@cache
def _library() -> ctypes.CDLL:
    """Load and start the driver, once.

    Raises:
        HostUnfitError: There is none, or it is too old.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HostUnfitError(f"cannot checkpoint GPU processes: {error}") from error
    if not hasattr(library, "cuCheckpointProcessRestore"):
        raise HostUnfitError(
            "cannot checkpoint GPU processes: the driver is older than 570; install 580 or newer"
        )
    result = library.cuInit(0)
    if result != _SUCCESS:
        raise HostUnfitError(
            f"cannot checkpoint GPU processes: cuInit failed with {_name(library, result)}"
        )
    return library


def _name(library: ctypes.CDLL, result: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(result, ctypes.byref(text))
    return text.value.decode() if text.value else f"CUDA error {result}"


def state(pid: int) -> ProcessState | None:
    """Return where the driver has a process; None if the process uses no GPU."""
    library = _library()
    value = ctypes.c_int()
    result = library.cuCheckpointProcessGetState(pid, ctypes.byref(value))
    if result == _NOT_INITIALIZED:
        return None
    if result != _SUCCESS:
        # A process without CUDA state answers differently from driver to driver.
        log.debug("state of process %d: %s", pid, _name(library, result))
        return None
    return ProcessState(value.value)


def using_gpus(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that have GPU state."""
    return [pid for pid in pids if state(pid) is not None]


def _step(step: str, pid: int, function: str, argument: Any) -> None:
    library = _library()
    result = getattr(library, function)(pid, argument)
    if result != _SUCCESS:
        reason = _name(library, result)
        if result == _NOT_SUPPORTED:
            reason += ": it has something that no checkpoint keeps, such as a profiler or debugger"
        raise DriverError(step, pid, reason, result)


def lock(pid: int, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
    """Let the process's GPU work end and admit no more; on a timeout it runs on."""
    arguments = _LockArgs(timeout_ms=int(timeout_seconds * 1000))
    _step("lock", pid, "cuCheckpointProcessLock", ctypes.byref(arguments))


def checkpoint(pid: int) -> None:
    """Take a locked process's GPU state into its own memory and give its GPUs free."""
    _step("checkpoint", pid, "cuCheckpointProcessCheckpoint", None)


def restore(pid: int, gpus: Mapping[UUID, UUID] | None = None) -> None:
    """Bring a checkpointed process's GPU state back.

    Args:
        pid: The process.
        gpus: From the GPU that each was to the GPU that it shall be, for all that it sees; without
            it, all stay what they were.
    """
    argument = None
    if gpus:
        pairs = (_GpuPair * len(gpus))()
        for pair, (old, new) in zip(pairs, gpus.items(), strict=True):
            pair.old[:] = old.bytes
            pair.new[:] = new.bytes
        argument = ctypes.byref(_RestoreArgs(pairs=pairs, count=len(gpus)))
    try:
        _step("restore", pid, "cuCheckpointProcessRestore", argument)
    except DriverError as error:
        moves = gpus is not None and any(old != new for old, new in gpus.items())
        if argument is None or moves or error.code != _INVALID_VALUE:
            raise
        log.warning("%s; once more without a map, since nothing moves", error)
        _step("restore", pid, "cuCheckpointProcessRestore", None)


def unlock(pid: int) -> None:
    """Let a locked process work again."""
    _step("unlock", pid, "cuCheckpointProcessUnlock", None)


def suspend_all(pids: Sequence[int], timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
    """Lock all, then checkpoint all; after a failure all run as before.

    Raises:
        DriverError: The driver refused a process.
    """
    try:
        together(lambda pid: lock(pid, timeout_seconds), pids)
        together(checkpoint, pids)
        _verify(pids)
    except BaseException:
        resume_all(pids)
        raise


def _verify(pids: Sequence[int]) -> None:
    for pid in pids:
        now = state(pid)
        if now is not ProcessState.CHECKPOINTED:
            found = "not using any GPU" if now is None else now.name.lower()
            raise DriverError("checkpoint", pid, f"afterwards it is {found}")


def resume_all(pids: Sequence[int], gpus: Mapping[int, Mapping[UUID, UUID]] | None = None) -> None:
    """Restore all that are checkpointed, then unlock all that are locked.

    Every process is brought as far as it goes before the first failure is raised.

    Args:
        pids: The processes.
        gpus: The map of each process whose GPUs change; see `restore`.
    """
    maps = gpus or {}
    checkpointed = [pid for pid in pids if state(pid) is ProcessState.CHECKPOINTED]
    ended = attempts(lambda pid: restore(pid, maps.get(pid)), checkpointed)
    locked = [pid for pid in pids if state(pid) is ProcessState.LOCKED]
    ended += attempts(unlock, locked)
    for future in ended:
        future.result()


def gpu_map(
    seen: Sequence[UUID], used: Mapping[UUID, UUID], present: Sequence[UUID]
) -> dict[UUID, UUID]:
    """Return the map that the driver wants: all GPUs that a process sees, each to a different one.

    Args:
        seen: All GPUs that the process saw.
        used: From each GPU that it uses to the GPU that this shall be.
        present: All GPUs of this host.

    The GPUs that the process sees and does not use take what is left over, themselves first. Where
    nothing moves the map says so, GPU by GPU. Empty only for a process that sees one GPU and keeps
    it.
    """
    if len(set(used.values())) != len(used):
        raise UsageError("cannot map GPUs: two GPUs of one process would become one")
    chosen = dict(used)
    taken = set(used.values())
    for gpu in seen:
        if gpu not in chosen and gpu not in taken and gpu in present:
            chosen[gpu] = gpu
            taken.add(gpu)
    left = [gpu for gpu in present if gpu not in taken]
    for gpu in seen:
        if gpu not in chosen and left:
            chosen[gpu] = left.pop(0)
    if len(seen) == 1 and chosen.get(seen[0]) == seen[0]:
        return {}
    return {gpu: chosen[gpu] for gpu in seen if gpu in chosen}
