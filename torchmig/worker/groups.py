"""Follows process groups as a script makes them, so that the gate knows their names and members."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torchmig import _C
from torchmig.worker import device, rendezvous
from torchmig.worker.wrapping import wrap


def install() -> None:
    """Hook the making and destroying of groups, gloo's constructor and coalesced blocks."""
    _wrap_everywhere("init_process_group", _init)
    _wrap_everywhere("destroy_process_group", _destroy)
    wrap(c10d, "_new_process_group_helper", _make)
    _wrap_everywhere("_new_group_with_tag", _new_group)
    if hasattr(c10d, "split_group"):
        _wrap_everywhere("split_group", _split_group)
    if hasattr(c10d, "ProcessGroupGloo"):
        wrap(c10d.ProcessGroupGloo, "__init__", watch_construction)
    wrap(dist.ProcessGroup, "_start_coalescing", _start_coalescing)
    wrap(dist.ProcessGroup, "_end_coalescing", _end_coalescing)


def _wrap_everywhere(name: str, around: Callable[..., Any]) -> None:
    """Wrap a function of distributed_c10d, also where torch.distributed has it."""
    wrap(c10d, name, around)
    if hasattr(dist, name):
        setattr(dist, name, getattr(c10d, name))


def _init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("store") is not None:
        kwargs["store"] = rendezvous.wrap(kwargs["store"])
    with _making([]):
        return original(*args, **kwargs)


def _new_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    # Otherwise the whole job has to make a group, those who will not be in it as well.
    only_members = given.get("use_local_synchronization", False)
    ranks = given.get("ranks") if only_members else None
    if ranks is not None and dist.get_rank() not in ranks:
        return original(*args, **kwargs)  # torch sends it away: it takes no part
    with _making(sorted(ranks or [])):
        return original(*args, **kwargs)


def _split_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    parent = given.get("parent_pg")
    before = _C.ProcessView.now()
    with _making(dist.get_process_group_ranks(parent) if parent is not None else []):
        made = original(*args, **kwargs)
    if isinstance(made, dist.ProcessGroup):
        # Its backends come out of C++, where no constructor could be watched.
        _C.remember_torch(before, _C.ProcessView.now(), device.nccl_sockets())
        _C.register_group(made, made.group_name, dist.get_process_group_ranks(made))
    return made


@contextmanager
def _making(ranks: list[int]) -> Iterator[None]:
    """Count the making of a group that `ranks` must all take part in; empty for the whole job."""
    _C.create_begin(ranks)
    try:
        yield
    finally:
        _C.create_end()


def _make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = original(*args, **kwargs)
    group = made[0]
    if isinstance(group, dist.ProcessGroup):
        # Arguments: group_size, group_rank, global_ranks_in_group, …; empty means everybody.
        members = args[2] if len(args) > 2 else kwargs["global_ranks_in_group"]
        _C.register_group(group, group.group_name, list(members) or list(range(group.size())))
    return made


def _destroy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if not dist.is_initialized():
        rendezvous.stores.clear()
    return result


def watch_construction(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the constructor of a backend and remember the sockets and threads that it makes."""
    before = _C.ProcessView.now()
    result = original(*args, **kwargs)
    _C.remember_torch(before, _C.ProcessView.now())
    return result


def _start_coalescing(original: Callable[..., Any], group: Any, *args: Any) -> Any:
    _C.block_begin(group)
    return original(group, *args)


def _end_coalescing(original: Callable[..., Any], group: Any, *args: Any) -> Any:
    try:
        return original(group, *args)
    finally:
        _C.block_end()
