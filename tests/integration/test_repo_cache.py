"""A node's folder in front of a distant repository: durable here soon, there later."""

import random
import secrets
import threading
from pathlib import Path

import pytest
from fault_proxy import FaultProxy

from torchmig.errors import (
    DeadlineMissedError,
    IntegrityError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
    StoreError,
)
from torchmig.repo import Depot, JobName, Manifest, RankSection, Repository
from torchmig.repo.cache import LocalCache, Reached
from torchmig.repo.check import Checker, Subset
from torchmig.repo.copy import copy_snapshot
from torchmig.repo.prune import prune
from torchmig.store import RetryingStore, RetryPolicy
from torchmig.store.s3 import S3Options, S3Store

pytest_plugins = ["store_fixtures"]
MIB = 1 << 20
IMPATIENT = RetryPolicy(deadline_seconds=0.2, first_wait_seconds=0.01)


def noise(seed, size=4 * MIB):
    return random.Random(seed).randbytes(size)


def write(cache, rank, seed):
    with cache.writer() as writer:
        streams = []
        for kind in ("gpu-block", "host-pages"):
            stream = writer.stream(f"rank-{rank}/{kind}", kind)
            stream.write(0, noise(f"{seed}{rank}{kind}"))
            streams.append(stream.close())
    return RankSection(rank, f"node{rank}", 1, streams)


def manifest_of(*sections, seed=0):
    return Manifest(JobName("job"), "suspend", ranks=list(sections), report={"seed": seed})


@pytest.fixture
def distant(tmp_path):
    return Repository.open(str(tmp_path / "distant"), create=True)


@pytest.fixture
def cache(distant, tmp_path):
    with LocalCache(lambda: distant, tmp_path / "near") as opened:
        yield opened


def test_it_says_what_is_reached(cache, distant):
    manifest = manifest_of(write(cache, 0, 1))
    assert cache.reached("0" * 64) is Reached.NOWHERE
    snapshot_id = cache.keep(manifest)
    assert cache.reached(snapshot_id) is Reached.NODE
    assert [summary.id for summary in cache.pending()] == [snapshot_id]
    assert distant.snapshots() == []
    report = cache.upload(manifest)
    assert report.sent_bytes >= 8 * MIB
    assert cache.reached(snapshot_id) is Reached.NODE  # blobs alone are no snapshot
    assert cache.commit(manifest) == snapshot_id
    assert cache.reached(snapshot_id) is Reached.REPOSITORY
    assert cache.pending() == []
    assert Checker(distant).run(Subset()).problems == []


def test_a_deadline_ends_an_upload_and_the_next_one_goes_on(cache, distant):
    manifest = manifest_of(*(write(cache, rank, 2) for rank in range(3)))
    snapshot_id = cache.keep(manifest)
    with pytest.raises(DeadlineMissedError, match="durable on this node only"):
        cache.upload(manifest, deadline_seconds=0.0)
    assert cache.reached(snapshot_id) is Reached.NODE
    already = sum(path.stat().st_size for path in Path(distant.url, "data").rglob("*/*"))
    assert already >= 3 * MIB
    report = cache.upload(manifest)
    assert report.sent_bytes <= 24.2 * MIB - already
    cache.commit(manifest)
    assert Checker(distant).run(Subset()).problems == []


def test_an_upload_can_be_finished_by_a_copy(cache, distant, tmp_path):
    manifest = manifest_of(write(cache, 0, 3))
    snapshot_id = cache.keep(manifest)
    cache.close()  # the node's job is over
    copy_snapshot(Repository.open(str(tmp_path / "near")), distant, snapshot_id)
    assert distant.snapshot_ids() == [snapshot_id]


def test_a_restore_takes_what_is_at_hand(cache, distant, tmp_path):
    manifest = manifest_of(write(cache, 0, 4))
    cache.keep(manifest)
    cache.upload(manifest)
    cache.commit(manifest)
    for pack in Path(distant.url, "data").rglob("*/*"):
        pack.unlink()  # so that reading there would fail
    with cache.reader(cache.load("latest")) as reader:
        for stream in manifest.streams:
            assert reader.read(stream) == noise(f"40{stream.kind}")
        reader.verify(manifest.streams)
        reader.restore(manifest.streams[0], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == noise("40gpu-block")


def test_a_restore_on_another_node_fetches(cache, distant, tmp_path):
    manifest = manifest_of(write(cache, 0, 5))
    cache.upload(manifest)
    cache.commit(manifest)
    with (
        LocalCache(lambda: Repository.open(distant.url), tmp_path / "elsewhere") as other,
        other.reader(other.load("latest")) as reader,
    ):
        assert reader.read(manifest.streams[1]) == noise("50host-pages")
        assert reader.read_range(manifest.streams[1], 5, 5) == noise("50host-pages")[5:10]
        assert b"".join(bytes(c) for _, c in reader.chunks(manifest.streams[1])) == noise(
            "50host-pages"
        )


def test_two_nodes(distant, tmp_path):
    """Each keeps its own ranks, each uploads its own, the coordinator commits."""
    caches = [
        LocalCache(lambda: Repository.open(distant.url), tmp_path / f"near{n}") for n in range(2)
    ]
    sections = [write(each, rank, 6) for rank, each in enumerate(caches)]
    manifest = manifest_of(*sections)
    ids = {each.keep(manifest) for each in caches}
    assert len(ids) == 1
    caches[0].upload(manifest, [0])
    with pytest.raises(IntegrityError, match="every node"):
        caches[0].commit(manifest)
    caches[1].upload(manifest, [1])
    caches[0].commit(manifest)
    assert Checker(distant).run(Subset()).problems == []
    # A node's folder lacks the other's blobs, which is no damage, and it can be pruned.
    for number, each in enumerate(caches):
        assert Checker(each.near).run(Subset()).problems == []
        gone = manifest_of(write(each, number, 66), seed=6)
        each.near.forget(each.keep(gone))
        each.near.release()
        assert prune(each.near, max_unused=0).freed_bytes >= 8 * MIB
    # Restored on the other way round, each node finds one rank near and fetches the other.
    for each in caches:
        with each.reader(each.load("latest")) as reader:
            for rank in range(2):
                stream = manifest.ranks[rank].streams[0]
                assert reader.read(stream) == noise(f"6{rank}gpu-block")
        each.close()


def test_the_folder_stays_within_its_size(distant, tmp_path):
    with LocalCache(lambda: distant, tmp_path / "near", 20 * MIB) as cache:
        ids = []
        for seed in range(4):
            manifest = manifest_of(write(cache, 0, f"s{seed}"), seed=seed)
            ids.append(cache.keep(manifest))
            cache.near.release()
            cache.upload(manifest)
            cache.commit(manifest)
        pending = cache.keep(manifest_of(write(cache, 0, "s9"), seed=9))
        cache.near.release()
        used = sum(path.stat().st_size for path in (tmp_path / "near").rglob("*/*/*"))
        assert used <= 28.5 * MIB
        assert cache.near.snapshot_ids() == sorted([*ids[-2:], pending])
        cache.trim()
        # What only this node has is never thrown away.
        assert pending in cache.near.snapshot_ids()
        assert distant.snapshot_ids() == sorted(ids)


def test_latest_is_the_later_one_of_both(cache, distant):
    first = manifest_of(write(cache, 0, 7))
    cache.keep(first)
    cache.upload(first)
    cache.commit(first)
    second = cache.keep(manifest_of(write(cache, 0, 8), seed=1))
    assert cache.load("latest").id == second
    third = distant.commit(manifest_of(seed=2))
    assert cache.load("latest").id == third
    assert cache.load(second[:16]).id == second
    with pytest.raises(SnapshotNotFoundError):
        cache.load("f" * 64)


def test_a_suspend_while_the_server_is_away(s3_servers, monkeypatch, tmp_path):
    """Durable here without the server; later uploads bring it there."""
    server = s3_servers("seaweedfs")
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    with FaultProxy(server.endpoint_url) as proxy:
        options = S3Options(endpoint_url=proxy.endpoint_url, read_timeout_seconds=2)
        store = RetryingStore(S3Store(f"bucket-{secrets.token_hex(6)}", "p", options), IMPATIENT)
        distant = Repository.on_store(store, create=True, make_bucket=True)
        cache = LocalCache(lambda: distant, tmp_path / "near")
        store.inner.close()
        proxy.unavailable = 1 << 30
        manifest = manifest_of(write(cache, 0, 9))
        snapshot_id = cache.keep(manifest)
        with pytest.raises(StoreError, match="gave up"):
            cache.upload(manifest)
        assert cache.load("latest").id == snapshot_id
        with cache.reader(manifest) as reader:
            reader.verify(manifest.streams)
        proxy.unavailable = 0
        cache.upload(manifest)
        cache.commit(manifest)
        assert cache.reached(snapshot_id) is Reached.REPOSITORY
        cache.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchmig")]


def test_a_depot_without_a_folder_is_the_repository_itself(tmp_path):
    depot = Depot.from_dict(Depot(str(tmp_path / "plain")).to_dict())
    with depot.holding() as repo:
        with depot.writing() as writer:
            stream = writer.stream("s", "file")
            stream.write(0, noise(1))
            done = stream.close()
        snapshot_id = repo.commit(manifest_of(RankSection(0, "n", 1, [done])))
    manifest = depot.load("latest")
    assert manifest.id == snapshot_id
    with depot.reading(manifest) as reader:
        assert reader.read(done) == noise(1)


def test_a_depot_on_two_nodes_with_a_server(s3_servers, monkeypatch, tmp_path):
    """What agents do: save, keep on every node, upload from every node, commit once, restore."""
    for variable, value in s3_servers("rclone").environment.items():
        monkeypatch.setenv(variable, value)
    address = f"s3://bucket-{secrets.token_hex(6)}/jobs"
    depots = [Depot(address, str(tmp_path / f"node{n}"), 1 << 30) for n in range(2)]
    sections = []
    for rank, depot in enumerate(depots):
        with depot.writing() as writer:
            stream = writer.stream(f"rank-{rank}/gpu", "gpu-block")
            stream.write(0, noise(rank))
            sections.append(RankSection(rank, f"node{rank}", 1, [stream.close()]))
    manifest = manifest_of(*sections)
    with depots[0].holding() as repo:
        snapshot_id = repo.commit(manifest)
    assert depots[1].keep(manifest) == snapshot_id
    assert depots[0].load("latest").id == snapshot_id  # there is not even a bucket yet
    with pytest.raises(RepositoryNotFoundError):
        depots[0].upload(manifest, sections[:1])
    Repository.open(address, create=True, make_bucket=True).close()
    with depots[0].delivering() as cache:
        for rank, depot in enumerate(depots):
            depot.upload(manifest, [sections[rank]])
        assert cache.commit(manifest) == snapshot_id
    fresh = Depot(address, str(tmp_path / "elsewhere"))
    with fresh.reading(fresh.load(snapshot_id[:9])) as reader:
        reader.verify(manifest.streams)
        reader.restore(manifest.streams[1], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == noise(1)
