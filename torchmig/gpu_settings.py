"""What ranks on GPUs are given in their environment, where the user has not set it."""

from collections.abc import Mapping
from typing import NamedTuple

NEEDED = {
    "NCCL_NVLS_ENABLE": ("0", "multicast memory cannot be checkpointed"),
    "NCCL_RAS_ENABLE": ("0", "NCCL's monitoring thread keeps sockets open"),
    "NCCL_CUMEM_HOST_ENABLE": ("0", "host memory made by the driver for sharing cannot be dumped"),
    "NCCL_GRAPH_REGISTER": ("0", "registrations would outlive the memory that they name"),
    "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": ("0", "memory made for sharing cannot be given back"),
    "UV_USE_IO_URING": ("0", "CRIU cannot dump io_uring"),
}
"""Each with the value that a checkpoint needs, and why."""

ONE_NODE = {"NCCL_NET": "Socket"}
"""What ranks of one node are given besides.

Of every InfiniBand, RoCE or EFA device that a host has NCCL keeps a descriptor until the process
ends, even where its ranks have only each other to talk to.
"""


class Misfit(NamedTuple):
    """A setting of the user's that a checkpoint does not survive."""

    setting: str
    reason: str
    cure: str

    def __str__(self) -> str:
        """Return all of it."""
        return f"{self.setting}: {self.reason}; {self.cure}"


def misfits(environment: Mapping[str, str]) -> list[Misfit]:
    """Return those in an environment."""
    found = []
    for name, (value, reason) in NEEDED.items():
        own = environment.get(name)
        if own is not None and own != value:
            cure = f"set {name}={value} or leave it unset"
            found.append(Misfit(f"{name}={own}", reason, cure))
    if environment.get("NCCL_CUMEM_ENABLE") == "0":
        reason = "without it ranks in namespaces of their own cannot share GPU memory"
        found.append(Misfit("NCCL_CUMEM_ENABLE=0", reason, "leave it unset"))
    return found
