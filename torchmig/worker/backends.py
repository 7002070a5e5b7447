"""Finds out whether a script calls a Backend by itself, past its process group and the gate.

What is issued so cannot be counted: no cut would be one. It is noted, and refused by name when a
checkpoint is asked for.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Backend  # torch.distributed.Backend is another

from torchmig.worker.wrapping import wrap

# What moves bytes between ranks. The rest of a Backend's methods ask and set.
_OPERATIONS = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "monitored_barrier",
)

_called: set[str] = set()


def install() -> None:
    """Hook the operations of the class that all backends share."""
    for name in _OPERATIONS:
        if hasattr(Backend, name):
            wrap(Backend, name, functools.partial(_note, name))


def _note(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _called.add(name)
    return original(*args, **kwargs)


def refused() -> list[str]:
    """Return why this rank cannot be checkpointed, if it has called a Backend by itself."""
    if not _called:
        return []
    return [
        f"it calls a Backend object by itself ({', '.join(sorted(_called))}), which cannot be "
        "counted; call the process group, or torch.distributed's functions"
    ]
