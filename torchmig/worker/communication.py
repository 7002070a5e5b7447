"""Takes a parked rank's communication down and builds it anew.

The ProcessGroup objects stay; only the backends inside them and the connection of the store are
replaced, so that everything which holds a group goes on.
"""

import contextlib
import gc
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torchmig import _C
from torchmig.worker import nccl, rendezvous

# Where backends that are built anew find each other.
_BACKENDS = "torchmig-backend/"
# What is in the store and not the script's, so not saved: addresses, and torchelastic's own state.
_NOT_THE_SCRIPTS = (_BACKENDS, "torch.rendezvous.", "torchelastic/")


@dataclass(frozen=True)
class Place:
    """Where the job's store is now.

    `prefix` holds the script's keys, empty in a job's first life; `generation` is new each time
    that communication is built.
    """

    host: str
    port: int
    prefix: str
    generation: str


@dataclass
class _Backend:
    """One backend of one group, to be built again."""

    group: dist.ProcessGroup
    name: str  # of the group
    kind: str  # gloo | nccl
    device: str
    timeout: timedelta
    members: list[int]
    placeholder: Any
    recipe: nccl.Recipe | None  # of a backend that is NCCL's


_taken_down: list[_Backend] = []


def refused() -> list[str]:
    """Return what this rank uses that cannot be restored, each with what to do."""
    reasons = []
    if dist.is_initialized():
        for group in c10d._world.pg_map:
            for _, backend in _backends(group):
                if _kind(backend) not in ("gloo", "fake", "nccl"):
                    reasons.append(
                        f"process group '{group.group_name}' uses the backend '{_kind(backend)}': "
                        "only gloo and nccl can be taken down and built anew"
                    )
    return sorted(set(reasons))


def waits_on_gpus() -> bool:
    """Return whether kernels of this rank wait for kernels of other ranks.

    The same while communication is down: a placeholder has the name of what it stands for.
    """
    return dist.is_initialized() and any(
        group.size() > 1 and any(_kind(backend) == "nccl" for _, backend in _backends(group))
        for group in c10d._world.pg_map
    )


def store_keys() -> dict[str, bytes]:
    """Return what the script has put into the store: empty if it has none."""
    if not rendezvous.stores:
        return {}
    store = rendezvous.stores[-1]
    keys = [k for k in store.list_keys() if not any(part in k for part in _NOT_THE_SCRIPTS)]
    return dict(zip(keys, store.multi_get(keys), strict=True)) if keys else {}


def groups() -> list[tuple[str, int, int]]:
    """Return name, first member and number of members of each group of this rank."""
    if not dist.is_initialized():
        return []
    return [(group.group_name, _members(group)[0], group.size()) for group in c10d._world.pg_map]


def _members(group: dist.ProcessGroup) -> list[int]:
    return sorted(c10d._world.pg_group_ranks[group])


def mute() -> None:
    """Let no backend hear of the end of a connection any more.

    The caller has seen that nothing moves any more (`what_moves` on all ranks), and mutes all
    ranks before it takes the first of them down: gloo's thread aborts the process if it hears of a
    peer that has gone while this rank's own sockets are being replaced.
    """
    _C.remember_watched()
    _C.mute_torch_sockets()


def take_down(parted: Collection[tuple[str, int]]) -> int:
    """Drop every backend and the store's connection; return how many sockets had to be closed.

    All ranks have been muted. May be called again where it has failed half way.

    Args:
        parted: Name and first member of groups that nobody else has any more: they keep the
            placeholder, which can be destroyed as well.
    """
    _taken_down[:] = [each for each in _taken_down if each.group in c10d._world.pg_map]
    if dist.is_initialized():
        for group in list(c10d._world.pg_map):
            _take_down_group(group, (group.group_name, _members(group)[0]) in parted)
    # Backends die with their last reference: cycles in the script's heap must not delay that.
    gc.collect()
    for store in rendezvous.stores:
        store.detach()
    return int(_C.neutralise_torch_sockets())


def _take_down_group(group: dist.ProcessGroup, is_parted: bool) -> None:
    seen: list[Any] = []
    for device, backend in _backends(group):
        if any(backend is other for other in seen):
            continue
        seen.append(backend)
        kind = _kind(backend)
        if kind not in ("gloo", "nccl") or isinstance(backend, _C.ParkedBackend):
            continue
        recipe = nccl.recipe(group, backend) if kind == "nccl" else None
        placeholder = _C.ParkedBackend(backend.rank(), backend.size(), kind)
        seen.append(placeholder)  # one backend may serve several devices
        name, members, timeout = group.group_name, _members(group), backend.options._timeout
        what = _Backend(group, name, kind, str(device), timeout, members, placeholder, recipe)
        if not is_parted:
            _taken_down.append(what)
        if recipe is not None:
            nccl.shut_down(backend)
        _swap(group, backend, placeholder)


def build_up(place: Place, timeout_seconds: float) -> None:
    """Connect the store and build the backends that were taken down.

    Every rank calls this with the same arguments.
    """
    timeout = timedelta(seconds=timeout_seconds)
    before = _C.ProcessView.now()
    for store in rendezvous.stores:
        connection: dist.Store = dist.TCPStore(
            place.host, place.port, None, False, timeout, wait_for_workers=False
        )
        if place.prefix:
            connection = dist.PrefixStore(place.prefix, connection)
        store.attach(connection)
        del connection
    _C.remember_torch(before, _C.ProcessView.now())
    # By name, which is the same on all members: groups that overlap are built in one order.
    for backend in sorted(_taken_down, key=lambda each: (each.name, each.device)):
        new = _new_backend(backend, place.generation)
        _swap(backend.group, backend.placeholder, new)
        if backend.recipe is not None:
            nccl.connect(backend.recipe, backend.group, new)
    _taken_down.clear()


def _swap(group: dist.ProcessGroup, old: Any, new: Any) -> None:
    """Put a backend in the place of another.

    The group has its name from its backend; functional collectives find the group by it.
    """
    name, description = group.group_name, group.group_desc
    _C.swap_backend(group, old, new)
    group._set_group_name(name)
    group._set_group_desc(description)


def _new_backend(old: _Backend, generation: str) -> Any:
    # Under a prefix of its own, so that no address of an earlier life is found.
    store = dist.PrefixStore(
        f"{_BACKENDS}{generation}/{old.name}/{old.device}", old.group.get_group_store()
    )
    if old.recipe is not None:
        return nccl.make(old.recipe, old.group, store)
    new = c10d.ProcessGroupGloo(store, old.group.rank(), old.group.size(), timeout=old.timeout)
    new.options.global_ranks_in_group = old.members
    new.options.group_name = old.group.group_name
    new._set_sequence_number_for_group()
    return new


def _backends(group: dist.ProcessGroup) -> Iterator[tuple[torch.device, Any]]:
    """Return the backends of a group by device, as they are when each is asked for."""
    for device in group._device_types:
        # A backend may have been announced for a device and never made.
        with contextlib.suppress(RuntimeError):
            yield device, group._get_backend(device)


def _kind(backend: Any) -> str:
    return str(backend.name())
