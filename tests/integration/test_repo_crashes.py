"""Killed at any write: committed snapshots restore, and what is left is only garbage."""

import random
import shutil
from pathlib import Path

import pytest
from fault_store import CountingStore, HalfWritingFolder, KillingStore, run_in_child

from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo.check import Checker, Subset
from torchmig.repo.prune import prune
from torchmig.store import FolderStore

MIB = 1 << 20


def contents(seed, shared=b""):
    rng = random.Random(seed)
    return {
        "pages": shared + rng.randbytes(MIB),
        "gpu": rng.randbytes(4 * MIB + 5000),
        "file": bytes(MIB) + b"text " * 50_000,
    }


def save(repo, seed, shared=b""):
    """Write a snapshot; the packs are small so that there are many writes."""
    kinds = {"pages": "host-pages", "gpu": "gpu-block", "file": "file"}
    with repo.writer(budget_bytes=8 * MIB, threads=1) as writer:
        streams = []
        for name, content in contents(seed, shared).items():
            stream = writer.stream(name, kinds[name])
            stream.write(0, content)
            streams.append(stream.close())
    ranks = [RankSection(0, "n", 1, streams, {"seed": seed, "shared": len(shared)})]
    return repo.commit(Manifest(JobName("job"), "suspend", ranks=ranks))


def forget(repo, snapshot_id):
    repo.store.delete(f"snapshots/{snapshot_id}")


def assert_sound(folder, shared=b"", *, at_least=()):
    """Every snapshot that is there is whole, and those of `at_least` are there."""
    repo = Repository.open(str(folder))
    report = Checker(repo).run(Subset())
    assert report.problems == []
    ids = repo.snapshot_ids()
    assert set(at_least) <= set(ids)
    for snapshot_id in ids:
        snapshot = repo.load(snapshot_id)
        state = snapshot.ranks[0].state
        wanted = contents(state["seed"], shared[: state["shared"]])
        with repo.reader() as reader:
            for stream in snapshot.streams:
                assert reader.read(stream) == wanted[stream.name]
    return repo


def assert_prunable(folder, shared=b""):
    """A prune removes all garbage, a stale lock and half-written files included."""
    repo = Repository.open(str(folder))
    prune(repo, max_unused=0)
    repo.store.inner.sweep(0)
    repo = assert_sound(folder, shared)
    report = Checker(repo).run()
    assert report.unused_objects == []
    dry = prune(repo, dry_run=True, max_unused=0)
    assert (dry.unused_bytes, dry.deleted_packs) == (0, 0)
    assert list(repo.store.list("locks")) == []
    if not repo.snapshot_ids():
        assert list(repo.store.list("data")) == []


SHARED = random.Random(99).randbytes(MIB)
OLD, FORGOTTEN, NEW = 1, 2, 3


def prepared(folder):
    """A repository with one snapshot to keep and one that is to be forgotten."""
    repo = Repository.open(str(folder), create=True)
    kept = save(repo, OLD, SHARED)
    gone = save(repo, FORGOTTEN, SHARED)
    return kept, gone


ACTIONS = {
    "upload and commit": lambda repo, gone: save(repo, NEW, SHARED),
    "forget and prune": lambda repo, gone: (forget(repo, gone), prune(repo, max_unused=0)),
    "forget, upload, prune": lambda repo, gone: (
        forget(repo, gone),
        save(repo, NEW, SHARED),
        prune(repo, max_unused=0),
    ),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("how", ["between writes", "inside a write"])
def test_killed_at_every_write(tmp_path, action, how):
    template = tmp_path / "template"
    kept, gone = prepared(template)
    run = ACTIONS[action]

    def open_at(folder, writes):
        if how == "inside a write":
            return Repository.on_store(HalfWritingFolder(folder, writes))
        return Repository.on_store(KillingStore(FolderStore(folder), writes))

    points = 0
    while True:
        folder = tmp_path / f"at{points}"
        shutil.copytree(template, folder)
        finished = run_in_child(lambda at=folder, n=points: run(open_at(at, n), gone))
        assert_sound(folder, SHARED, at_least=[kept])
        # Somebody else goes on, although the dead process never gave its lock back.
        save(Repository.open(str(folder)), 4, SHARED)
        assert_prunable(folder, SHARED)
        shutil.rmtree(folder)
        if finished:
            break
        points += 1
    assert points >= 4


def test_killed_while_making_a_repository(tmp_path):
    for points in range(4):
        folder = tmp_path / str(points)
        finished = run_in_child(
            lambda at=folder, n=points: Repository.on_store(HalfWritingFolder(at, n), create=True)
        )
        save(Repository.open(str(folder), create=True), OLD)
        assert_sound(folder)
        if finished:
            break
    assert points >= 1


def test_half_an_upload_is_used_again(tmp_path):
    """What an upload that died had indexed is not sent twice."""
    folder = tmp_path / "repo"
    Repository.open(str(folder), create=True)
    counting = CountingStore(FolderStore(folder))
    save(Repository.on_store(counting), NEW)
    index_at = next(n for n, (_, name) in enumerate(counting.writes) if name.startswith("index/"))
    shutil.rmtree(folder)
    Repository.open(str(folder), create=True)
    killed = KillingStore(FolderStore(folder), index_at + 1)
    assert not run_in_child(lambda: save(Repository.on_store(killed), NEW))
    assert Repository.open(str(folder)).snapshots() == []
    again = CountingStore(FolderStore(folder))
    save(Repository.on_store(again), NEW)
    assert not [name for _, name in again.writes if name.startswith("data/")]
    assert_sound(folder)


def test_the_order_of_writes(tmp_path):
    """Packs before the index, the index before the manifest."""
    counting = CountingStore(FolderStore(Path(tmp_path / "repo")))
    repo = Repository.on_store(counting, create=True)
    save(repo, NEW)
    order = [name.partition("/")[0] for action, name in counting.writes if action == "put"]
    order = [prefix for prefix in dict.fromkeys(order) if prefix != "locks"]
    assert order == ["config", "data", "index", "snapshots"]
    assert counting.writes[-1][0] == "delete"  # the lock goes last
