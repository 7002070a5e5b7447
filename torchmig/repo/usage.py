"""Which blobs the snapshots use: what check looks for and prune keeps.

A prune that overlooked a snapshot would destroy it, so that everything here raises where a listing
would warn.
"""

from collections.abc import Iterable

from torchmig.errors import IntegrityError, TorchmigError
from torchmig.repo.fetch import fetch_all
from torchmig.repo.manifest import Manifest, load_manifest, snapshot_name
from torchmig.repo.repository import Repository


def load_all(repo: Repository) -> tuple[list[Manifest], list[TorchmigError]]:
    """Return all snapshots and what keeps others from being read."""
    manifests: list[Manifest] = []
    errors: list[TorchmigError] = []
    names = [snapshot_name(snapshot_id) for snapshot_id in repo.snapshot_ids()]
    for name, data in fetch_all(repo.store, names):
        try:
            manifests.append(load_manifest(name, data))
        except TorchmigError as error:
            errors.append(error)
    return manifests, errors


def used_blobs(repo: Repository, manifests: Iterable[Manifest]) -> dict[bytes, int]:
    """Return each blob that a snapshot uses and its size; raise if a tree cannot be read.

    In a node's folder, streams of other nodes are left out, and their blobs may be in the result.
    """
    used: dict[bytes, int] = {}
    read: set[tuple[bytes, ...]] = set()
    index = repo.index() if repo.is_node_folder() else None
    for manifest in manifests:
        with repo.reader(manifest) as reader:
            for stream in manifest.streams:
                used.update(dict.fromkeys(stream.trees, 0))
                if stream.trees and stream.trees in read:
                    continue  # equal trees hold equal extents
                if index is not None and any(tree not in index for tree in stream.trees):
                    continue
                read.add(stream.trees)
                used.update((row[2], row[1]) for row in reader.rows(stream))
    return used


def load_all_or_refuse(repo: Repository, action: str) -> list[Manifest]:
    """Return all snapshots; raise if one of them cannot be read."""
    manifests, errors = load_all(repo)
    if errors:
        raise IntegrityError(
            f"cannot {action}: {errors[0]}; forget that snapshot by its id first"
        ) from errors[0]
    return manifests
