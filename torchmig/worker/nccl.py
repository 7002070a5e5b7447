"""ProcessGroupNCCL, taken down at the cut and made anew in the same ProcessGroup.

The driver says yes to a checkpoint of a process with live communicators and loses the process at
the restore, so not one may be left. What a new backend must be like is written down while the old
one still exists.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# What ProcessGroupNCCL.Options is made of besides the timeout, in the releases that have it.
_OPTION_FIELDS = ("global_ranks_in_group", "group_name", "group_desc")
_CONFIG_FIELDS = (
    "blocking",
    "cga_cluster_size",
    "min_ctas",
    "max_ctas",
    "net_name",
    "split_share",
    "traffic_class",
    "comm_name",
    "collnet_enable",
    "cta_policy",
    "shrink_share",
    "nvls_ctas",
    "n_channels_per_net_peer",
    "nvlink_centric_sched",
    "graph_usage_mode",
)


@dataclass(frozen=True)
class Recipe:
    """What it takes to make a backend like one that was."""

    is_high_priority_stream: bool
    timeout: timedelta
    options: dict[str, Any]
    config: dict[str, Any]
    bound_device: torch.device | None
    was_connected: bool  # it had its communicator: the new one connects before the job goes on


def recipe(group: dist.ProcessGroup, backend: Any) -> Recipe:
    """Return how to make a backend like this one, before it is shut down."""
    options = backend.options
    return Recipe(
        is_high_priority_stream=options.is_high_priority_stream,
        timeout=options._timeout,
        options=_read(options, _OPTION_FIELDS),
        config=_read(options.config, _CONFIG_FIELDS) if hasattr(options, "config") else {},
        bound_device=group.bound_device_id,
        was_connected=bool(getattr(backend, "_is_initialized", lambda: False)()),
    )


def _read(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {}
    for name in names:
        try:
            value = getattr(owner, name)
        except (AttributeError, TypeError, UnicodeDecodeError):
            continue  # not in this release, or never set
        if value is not None:
            values[name] = value
    return values


def shut_down(backend: Any) -> None:
    """Wait for the backend's works, destroy its communicators and end its threads."""
    if hasattr(backend, "_wait_for_pending_works"):
        backend._wait_for_pending_works()
    backend.shutdown()


def make(what: Recipe, group: dist.ProcessGroup, store: dist.Store) -> Any:
    """Return a new backend of the group; all members call this, with stores that are one."""
    options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=what.is_high_priority_stream)
    options._timeout = what.timeout
    for name, value in what.options.items():
        setattr(options, name, value)
    for name, value in what.config.items():
        setattr(options.config, name, value)
    new = c10d.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    new._set_sequence_number_for_group()
    return new


def connect(what: Recipe, group: dist.ProcessGroup, new: Any) -> None:
    """Bind the swapped-in backend as the old one was, and connect it if that was connected."""
    if what.bound_device is None:
        return  # it connects by itself at its first collective, as the old one did
    group.bound_device_id = what.bound_device
    if what.was_connected:
        new.eager_connect_single_device(what.bound_device)
