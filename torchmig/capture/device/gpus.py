"""Facts about this host's GPUs, from NVML, and whether a snapshot's ranks fit them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import pynvml

from torchmig.errors import HostUnfitError, SnapshotUnfitError, UsageError
from torchmig.units import format_size

OLDEST_DRIVER = 580


@dataclass(frozen=True)
class Gpu:
    """One GPU as it is now."""

    index: int
    uuid: str  # as "GPU-…"
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    pids: tuple[int, ...]

    @property
    def id(self) -> UUID:
        """The identity that the driver's maps use."""
        return parse_uuid(self.uuid)


def parse_uuid(text: str) -> UUID:
    """Return a GPU's identity from either of its spellings."""
    return UUID(text.removeprefix("GPU-"))


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise HostUnfitError(f"cannot see this host's GPUs: {error}") from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def list_gpus() -> list[Gpu]:
    """Return this host's GPUs; none where there is no driver."""
    try:
        with _nvml():
            return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except HostUnfitError:
        return []


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    pids: tuple[int, ...] = ()
    with contextlib.suppress(pynvml.NVMLError):  # not permitted in some containers
        pids = tuple(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=(int(major), int(minor)),
        pids=pids,
    )


def driver_version() -> str:
    """Return the driver's version, empty where there is none."""
    try:
        with _nvml():
            return _text(pynvml.nvmlSystemGetDriverVersion())
    except HostUnfitError:
        return ""


def require_driver() -> None:
    """Refuse a host whose driver cannot checkpoint.

    Raises:
        HostUnfitError: It has none, or one that is too old.
    """
    version = driver_version()
    if not version:
        raise HostUnfitError("cannot checkpoint GPU processes: this host has no NVIDIA driver")
    if int(version.split(".")[0]) < OLDEST_DRIVER:
        raise HostUnfitError(
            f"cannot checkpoint GPU processes: driver '{version}' is older than {OLDEST_DRIVER}; "
            "install a newer one"
        )


def choose(text: str, present: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that the user names by index or UUID, separated by commas, in that order.

    Raises:
        UsageError: One is not there.
    """
    by_name = {str(gpu.index): gpu for gpu in present} | {gpu.uuid: gpu for gpu in present}
    chosen = []
    for name in text.split(","):
        gpu = by_name.get(name.strip())
        if gpu is None:
            known = ", ".join(str(gpu.index) for gpu in present) or "none"
            raise UsageError(f"no GPU '{name.strip()}' on this host; there are: {known}")
        chosen.append(gpu)
    return chosen


@dataclass(frozen=True)
class Need:
    """What one rank of a snapshot wants of one GPU."""

    rank: int
    gpu: UUID  # where it was
    name: str
    bytes: int  # reserved by the allocator, plus what the context takes


def check_fit(needs: Sequence[Need], target: dict[tuple[int, UUID], Gpu], what: str) -> None:
    """Refuse GPUs that a snapshot's ranks do not fit, before any of them is touched.

    A driver restore that runs out of memory cannot be tried again.

    Args:
        needs: One entry a rank and GPU.
        target: Where each is to go.
        what: Names the snapshot in messages.

    Raises:
        SnapshotUnfitError: Another chip, or not enough free memory.
    """
    wanted: dict[str, int] = {}
    for need in needs:
        gpu = target[need.rank, need.gpu]
        if gpu.name != need.name:
            raise SnapshotUnfitError(
                f"cannot restore {what}: rank {need.rank} was on '{need.name}' and GPU {gpu.index} "
                f"is '{gpu.name}'; name GPUs of the same kind with --gpus"
            )
        wanted[gpu.uuid] = wanted.get(gpu.uuid, 0) + need.bytes
    for gpu in {gpu.uuid: gpu for gpu in target.values()}.values():
        asked = wanted.get(gpu.uuid, 0)
        if asked > gpu.free_bytes:
            raise SnapshotUnfitError(
                f"cannot restore {what}: GPU {gpu.index} has {format_size(gpu.free_bytes)} free "
                f"and {format_size(asked)} are needed; free some, or name other GPUs with --gpus"
            )
