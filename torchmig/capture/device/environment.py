"""The environment with which a rank must be started, so that its GPUs can be checkpointed later."""

import os
from collections.abc import Mapping
from pathlib import Path

import torchmig
from torchmig.gpu_settings import NEEDED, ONE_NODE
from torchmig.host import remote_memory_devices

_PRELOAD = "LD_PRELOAD"


def preload_library() -> Path | None:
    """Return the library that serves the allocator from the arena; None where it is not built."""
    found = sorted(Path(torchmig.__file__).parent.glob("_preload*.so"))
    return found[0] if found else None


def has_gpu() -> bool:
    """Return whether this host has an NVIDIA driver."""
    return Path("/dev/nvidiactl").exists()


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to a rank's environment; a user's own settings stay.

    The library comes first in LD_PRELOAD and the user's own follow. Only ranks get it: it would
    find nothing to do in other programs, and its way back out of their environment would be long.
    """
    if not has_gpu():
        return {}
    wanted = {name: value for name, (value, _) in NEEDED.items()}
    if _is_of_one_node(environment):
        wanted |= ONE_NODE
    added = {name: value for name, value in wanted.items() if name not in environment}
    library = preload_library()
    if library is not None:
        before = environment.get(_PRELOAD, "")
        if os.fspath(library) not in before.split(":"):
            added[_PRELOAD] = f"{library}:{before}" if before else os.fspath(library)
    return added


def _is_of_one_node(environment: Mapping[str, str]) -> bool:
    return environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")


def warn_of(environment: Mapping[str, str]) -> str | None:
    """Return what keeps a rank that is given this environment from ever being checkpointed.

    It may be wanted all the same: for ranks of several nodes it is what makes them fast.
    """
    if not has_gpu() or _is_of_one_node(environment):
        return None
    devices = remote_memory_devices(environment)
    if not devices:
        return None
    return (
        f"ranks of several nodes use {', '.join(devices)} (InfiniBand, RoCE or EFA) and cannot be "
        "checkpointed: to have that, over TCP, set NCCL_NET=Socket"
    )
