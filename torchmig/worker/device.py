"""What a parked rank does about its GPUs: which memory lives, out to staging, back from it.

Called by the control thread while no other thread runs CUDA work. A rank that has not used CUDA
answers every question with nothing.
"""

import bisect
import ctypes
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import torch

from torchmig import _C
from torchmig.worker import graphs

# The states of a block in the allocator's snapshot in which its bytes can still be read.
_DEAD = "inactive"
_DEFAULT_POOL = (0, 0)
_MOST_NVML_USERS = 64


def in_use() -> bool:
    """Return whether this process has GPU state."""
    return bool(torch.cuda.is_initialized())


def devices() -> list[int]:
    """Return the devices on which this process has a context."""
    if not in_use():
        return []
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # CUDA builds only
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


def describe() -> dict[str, Any]:
    """Return what the agent needs to know of this rank's GPUs before it asks for anything."""
    if not in_use():
        return {"devices": [], "visible": [], "arena": ""}
    return {
        "devices": [
            {
                "device": device,
                "uuid": _uuid(device),
                "name": torch.cuda.get_device_name(device),
                "live_bytes": torch.cuda.memory_allocated(device),
                "reserved_bytes": torch.cuda.memory_reserved(device),
            }
            for device in devices()
        ],
        # The map of a restore names every GPU that the process sees, not only those that it uses.
        "visible": [_uuid(device) for device in range(torch.cuda.device_count())],
        "arena": _C.arena_why_unusable(),
    }


def refused() -> list[str]:
    """Return what this rank does with GPUs that cannot be restored, each with what to do."""
    if not in_use():
        return []
    reasons = []
    seen = _C.arena_seen()
    told = {
        "managed_memory": "it uses managed memory (cudaMallocManaged); use device memory",
        "ipc_export": "it shares CUDA memory with other processes (CUDA IPC); share host tensors",
        "ipc_import": "it uses other processes' CUDA memory (CUDA IPC); share host tensors",
        "shareable_memory": (
            "it makes memory for NCCL windows, symmetric memory or NVSHMEM; switch these off"
        ),
        "multicast": "it uses multicast memory (NVLink SHARP); set NCCL_NVLS_ENABLE=0",
        "cupti": (
            "a profiler has used CUPTI in it, after which the driver cannot checkpoint it; "
            "run torchmig-run with --no-cupti"
        ),
    }
    reasons += [text for what, text in told.items() if seen[what]]
    if graphs.hold_collectives():
        reasons.append("a CUDA graph holds collectives; capture only what lies between them")
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        reasons.append("it uses backend:cudaMallocAsync; use the native allocator")
    return reasons


def _uuid(device: int) -> str:
    """Return a device's UUID as it is now: torch goes on showing that of the first life."""
    value = (ctypes.c_ubyte * 16)()
    if ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(value, device) != 0:
        raise RuntimeError(f"the driver does not say which GPU device {device} is")
    return str(UUID(bytes=bytes(value)))


def nccl_sockets() -> list[int]:
    """Return the inode numbers of NCCL's sockets, which go when communication is taken down."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.fspath(entry.readlink())
        except OSError:
            continue  # the listing's own
        if target.startswith("socket:[") and _C.is_nccl_socket(int(target[8:-1])):
            found.append(int(target[8:-1]))
    return found


def end_compile_workers() -> None:
    """End the processes that compile kernels beside this one; torch starts new ones when asked.

    They have opened the GPU's device files and hold nothing that is worth keeping.

    Raises:
        RuntimeError: One of them is at work.
    """
    # Only a script that compiles has loaded it.
    compiling = sys.modules.get("torch._inductor.async_compile")
    if not in_use() or compiling is None:
        return
    if any(getattr(pool, "pending_futures", None) for pool in compiling._pool_set):
        raise RuntimeError("kernels are being compiled in the background; ask again later")
    compiling.shutdown_compile_workers()


def settle() -> None:
    """Wait until all work on all devices is done."""
    for device in devices():
        torch.cuda.synchronize(device)


def live_blocks() -> list[tuple[int, int, int]]:
    """Return the memory in the arena that has to be kept: device, address, size in bytes.

    Blocks that are in use, at the size that was asked for; the pools of CUDA graphs whole, since a
    graph may read what no tensor owns any more; and whatever of the arena the allocator does not
    know, whole.
    """
    if not in_use():
        return []
    unknown = {address: (device, size) for device, address, size in _C.arena_mappings()}
    starts = sorted(unknown)
    blocks: list[tuple[int, int, int]] = []
    for segment in torch.cuda.memory_snapshot():
        begin, end = segment["address"], segment["address"] + segment["total_size"]
        inside = starts[bisect.bisect_left(starts, begin) : bisect.bisect_left(starts, end)]
        if not inside:
            continue  # not in the arena: the driver saves it
        for start in inside:
            del unknown[start]
        if tuple(segment["segment_pool_id"]) != _DEFAULT_POOL:
            blocks.append((segment["device"], begin, segment["total_size"]))
        else:
            blocks += _live_in(segment)
    blocks += [(device, address, size) for address, (device, size) in unknown.items()]
    return sorted(blocks)


def _live_in(segment: dict[str, Any]) -> Iterable[tuple[int, int, int]]:
    for block in segment["blocks"]:
        if block["state"] != _DEAD:
            # Beyond what was asked for nobody may look, and what lies there differs from rank to
            # rank; zero is what a block has whose size the allocator never learned.
            size = block["requested_size"] or block["size"]
            yield segment["device"], block["address"], size


def copy(out: bool, staging_socket: str, pieces: list[tuple[int, int, int, int]]) -> None:
    """Copy device memory to staging or back.

    Args:
        out: Direction: out of the device, or into it.
        staging_socket: Where the agent hands out the staging's descriptor.
        pieces: Device, address, size, offset in staging; offsets rise.
    """
    staging = _receive(staging_socket)
    try:
        for device in sorted({piece[0] for piece in pieces}):
            own = [piece[1:] for piece in pieces if piece[0] == device]
            _C.copy_pieces(out, device, staging, own)
    finally:
        os.close(staging)


def _receive(path: str) -> int:
    """Return the descriptor that the agent hands out; nothing else of the connection is kept."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            raise RuntimeError(f"no staging at '{path}': {error.strerror}") from error
        _, fds, _, _ = socket.recv_fds(connection, 16, 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != 1:
        raise RuntimeError(f"no staging was handed out at '{path}'")
    return fds[0]


def release() -> int:
    """Give the arena's memory back to the devices, addresses kept; return how many bytes."""
    if not in_use():
        return 0
    released = int(_C.arena_physical_bytes())
    _C.arena_detach()
    return released


def regain() -> None:
    """Put memory behind the arena's addresses again; contents come by `copy`."""
    if in_use():
        _C.arena_attach()


# How often NVML had been started when it was closed.
_nvml_users = [0]


def close_nvml() -> None:
    """Close what NVML holds open.

    NCCL starts it, and the allocator when it has run out of memory; what it holds open is not the
    driver's to save, and cannot be dumped.
    """
    nvml = _loaded_nvml()
    count = 0
    while nvml is not None and count < _MOST_NVML_USERS and nvml.nvmlShutdown() == 0:
        count += 1
    _nvml_users[0] += count


def reopen_nvml() -> None:
    """Start NVML as often as it had been started: its users hold on to it for good."""
    nvml = _loaded_nvml()
    while nvml is not None and _nvml_users[0] > 0:
        if nvml.nvmlInit_v2() != 0:
            raise RuntimeError("NVML does not start again on this host")
        _nvml_users[0] -= 1


def _loaded_nvml() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
