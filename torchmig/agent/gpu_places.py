"""On which GPUs a job's ranks are, on which they may be restored, and who else is there."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from torchmig.agent.gpu import CONTEXT_BYTES
from torchmig.agent.gpu_state import state_of
from torchmig.capture.device import driver, gpus
from torchmig.capture.device.environment import has_gpu
from torchmig.errors import SnapshotUnfitError
from torchmig.repo import RankSection

_TURNS = (
    "ranks wait for each other on GPUs (NCCL), and after a checkpoint the driver does not let a "
    "kernel that waits take turns with other processes"
)


def plan_restore(
    sections: Sequence[RankSection], named: str | None, what: str
) -> dict[int, Mapping[UUID, UUID]]:
    """Return the GPU map of each rank, empty where nothing moves; nothing has been started yet.

    Args:
        sections: The ranks of this node.
        named: The GPUs that the user wants, as `--gpus` has them; None for the same ones, or, where
            these are not here, the first ones.
        what: Names the snapshot in messages.

    Raises:
        SnapshotUnfitError: They do not fit this host's GPUs.
    """
    facts: dict[int, dict[str, Any]] = {}
    for section in sections:
        fact = state_of(section).get("facts") or {}
        if fact.get("devices"):
            facts[section.rank] = fact
    if not facts:
        return {}
    present = gpus.list_gpus()
    if not present:
        raise SnapshotUnfitError(
            f"cannot restore {what}: its ranks use GPUs and this host has none"
        )
    gpus.require_driver()
    needs = [
        gpus.Need(rank, gpus.parse_uuid(d["uuid"]), d["name"], d["reserved_bytes"] + CONTEXT_BYTES)
        for rank, fact in sorted(facts.items())
        for d in fact["devices"]
    ]
    targets = _targets([need.gpu for need in needs], named, present, what)
    gpus.check_fit(needs, {(need.rank, need.gpu): targets[need.gpu] for need in needs}, what)
    _require_alone(facts, targets, what)
    ids = [gpu.id for gpu in present]
    maps: dict[int, Mapping[UUID, UUID]] = {}
    for rank, fact in facts.items():
        used = [gpus.parse_uuid(d["uuid"]) for d in fact["devices"]]
        seen = [gpus.parse_uuid(text) for text in fact["visible"]]
        maps[rank] = driver.gpu_map(seen, {gpu: targets[gpu].id for gpu in used}, ids)
    return maps


def _targets(
    used: Sequence[UUID], named: str | None, present: Sequence[gpus.Gpu], what: str
) -> dict[UUID, gpus.Gpu]:
    wanted = list(dict.fromkeys(used))
    here = {gpu.id: gpu for gpu in present}
    if named is None and all(gpu in here for gpu in wanted):
        return {gpu: here[gpu] for gpu in wanted}
    chosen = gpus.choose(named, present) if named is not None else list(present)
    if len(chosen) < len(wanted):
        raise SnapshotUnfitError(
            f"cannot restore {what}: it needs {len(wanted)} GPUs and {len(chosen)} are "
            f"{'named' if named is not None else 'here'}; name as many with --gpus"
        )
    return dict(zip(wanted, chosen, strict=False))


def not_alone(pids: Iterable[int]) -> list[str]:
    """Return why processes whose kernels wait for other ranks' must not be checkpointed.

    A context that the driver has checkpointed and restored cannot be switched away from in the
    middle of a kernel any more (Xid 109, "CTX SWITCH TIMEOUT"). Kernels that end are not concerned;
    one that waits for a rank on another GPU is ended with an error as soon as any other process
    wants a turn on its own.
    """
    own = set(pids)
    reasons = []
    for gpu in gpus.list_gpus():
        others = sorted(set(gpu.pids) - own)
        if others and own & set(gpu.pids):
            reasons.append(
                f"GPU {gpu.index} is shared with process {others[0]}: {_TURNS}; give the ranks "
                "GPUs of their own"
            )
    return reasons


def _require_alone(
    facts: Mapping[int, Mapping[str, Any]], targets: Mapping[UUID, gpus.Gpu], what: str
) -> None:
    for rank, fact in sorted(facts.items()):
        for device in fact["devices"] if fact.get("waits_on_gpus") else ():
            gpu = targets[gpus.parse_uuid(device["uuid"])]
            if gpu.pids:
                raise SnapshotUnfitError(
                    f"cannot restore {what}: process {gpu.pids[0]} is on GPU {gpu.index}, where "
                    f"rank {rank} would go: {_TURNS}; end it, or name other GPUs with --gpus"
                )


def used_gpus(pids: Iterable[int]) -> list[dict[str, Any]]:
    """Return which of this host's GPUs the processes use, with the memory that is taken there."""
    if not has_gpu():
        return []
    own = set(pids)
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "used_bytes": gpu.total_bytes - gpu.free_bytes,
            "total_bytes": gpu.total_bytes,
        }
        for gpu in gpus.list_gpus()
        if own & set(gpu.pids)
    ]
