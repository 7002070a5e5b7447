"""Writers share, a prune excludes, a dead owner does not block, and no host's clock matters."""

import os
import threading
from pathlib import Path

import pytest
from fault_store import run_in_child

from torchmig.errors import RepositoryLockedError, StoreError
from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo import locks as locks_module
from torchmig.repo.check import Checker
from torchmig.repo.locks import Lock, LockKind, read_locks
from torchmig.repo.prune import prune

pytest_plugins = ["store_fixtures"]
MIB = 1 << 20


@pytest.fixture
def repo(tmp_path):
    return Repository.open(str(tmp_path / "repo"), create=True)


def take(repo, kind, **options):
    return Lock.acquire(repo.store, kind, "test", wait_seconds=0, **options)


def write(repo, content):
    with repo.writer() as writer:
        stream = writer.stream("s", "file")
        stream.write(0, content)
        return stream.close()


def commit(repo, stream):
    ranks = [RankSection(0, "n", 1, [stream])]
    return repo.commit(Manifest(JobName("job"), "suspend", ranks=ranks))


def test_who_may_hold_a_lock_beside_whom(store):
    def acquire(kind):
        return Lock.acquire(store, kind, "test", wait_seconds=0)

    first, second = acquire(LockKind.SHARED), acquire(LockKind.SHARED)
    with pytest.raises(RepositoryLockedError, match=r"test.*torchmig unlock"):
        acquire(LockKind.EXCLUSIVE)
    first.release()
    second.release()
    alone = acquire(LockKind.EXCLUSIVE)
    for kind in LockKind:
        with pytest.raises(RepositoryLockedError):
            acquire(kind)
    assert [info.kind for info in read_locks(store)] == [LockKind.EXCLUSIVE]
    alone.release()
    assert read_locks(store) == []


def test_a_waiting_writer_gets_its_turn(repo):
    alone = take(repo, LockKind.EXCLUSIVE)
    got = []
    thread = threading.Thread(
        target=lambda: got.append(Lock.acquire(repo.store, LockKind.SHARED, "w", wait_seconds=60))
    )
    thread.start()
    alone.release()
    thread.join()
    assert len(got) == 1


def test_a_prune_beside_an_upload(repo):
    """From the writer's start to the commit, a prune is refused; nothing that was found is lost."""
    old = commit(repo, write(repo, b"old" * MIB))
    other = Repository.open(repo.url)
    repo.store.delete(f"snapshots/{old}")  # its blobs are garbage now, until somebody uses them
    with other.writer() as writer:
        stream = writer.stream("s", "file")
        stream.write(0, b"old" * MIB)
        with pytest.raises(RepositoryLockedError):
            prune(repo)
        done = stream.close()
    assert writer.stats.new_bytes == 0
    with pytest.raises(RepositoryLockedError):
        prune(repo)
    commit(other, done)
    prune(repo)
    with Repository.open(repo.url).reader() as reader:
        assert reader.read(done) == b"old" * MIB


def test_an_agent_gives_its_lock_back(repo):
    write(repo, b"x")
    assert len(read_locks(repo.store)) == 1
    repo.release()
    assert read_locks(repo.store) == []
    with Repository.open(repo.url) as again:
        write(again, b"y")
    assert read_locks(repo.store) == []


def test_a_failed_writer_gives_its_lock_back(repo):
    def fail():
        with repo.writer():
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert read_locks(repo.store) == []


def test_the_lock_of_a_dead_process_is_removed(repo):
    run_in_child(lambda: take(repo, LockKind.EXCLUSIVE))
    (info,) = read_locks(repo.store)
    assert info.is_stale
    take(repo, LockKind.SHARED).release()
    assert read_locks(repo.store) == []


def test_a_lock_of_another_host_is_judged_by_the_stores_clock(repo, monkeypatch):
    """Neither the time in the lock nor this host's time counts."""
    foreign = locks_module.Owner("elsewhere", "other-boot", "pid:[1]", 1, "1")
    monkeypatch.setattr(locks_module.Owner, "this_process", classmethod(lambda cls: foreign))
    monkeypatch.setattr(locks_module, "now_rfc3339", lambda: "1999-01-01T00:00:00.000000Z")
    lock = take(repo, LockKind.EXCLUSIVE)
    monkeypatch.setattr(locks_module.time, "time", lambda: 0.0)
    with pytest.raises(RepositoryLockedError, match="elsewhere"):
        take(repo, LockKind.SHARED)
    path = Path(repo.url) / lock.name
    long_ago = path.stat().st_mtime - locks_module.STALE_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    take(repo, LockKind.SHARED).release()
    assert not lock.refresh()


def test_a_lock_is_refreshed_while_a_writer_works(repo, monkeypatch):
    monkeypatch.setattr(locks_module, "REFRESH_SECONDS", 0.01)
    refreshed = threading.Event()
    original = Lock.refresh

    def refresh(self, **options):
        if threading.current_thread().name == "torchmig-lock":
            refreshed.set()
        return original(self, **options)

    monkeypatch.setattr(Lock, "refresh", refresh)
    with repo.writer():
        assert refreshed.wait(30)
    assert not [t for t in threading.enumerate() if t.name.startswith("torchmig")]


def test_a_writer_that_lost_its_lock_says_so(repo):
    def write_and_lose():
        with repo.writer() as writer:
            writer.stream("s", "file").write(0, b"x" * 100)
            for info in read_locks(repo.store):
                repo.store.delete(info.name)

    with pytest.raises(StoreError, match="lost the lock"):
        write_and_lose()


def test_a_commit_after_a_prune_that_it_could_not_stop_is_refused(repo):
    """The lock has run out between the writer and the commit, and the blobs have gone."""
    content = os.urandom(20 * MIB)
    done = write(repo, content)
    for info in read_locks(repo.store):
        repo.store.delete(info.name)
    prune(Repository.open(repo.url))
    with pytest.raises(Exception, match=r"cannot commit|is in no index"):
        commit(repo, done)
    assert repo.snapshots() == []
    commit(repo, write(repo, content))
    with repo.reader() as reader:
        assert reader.read(done) == content


def test_a_reader_finds_blobs_that_a_prune_has_moved(repo):
    noise = [os.urandom(3 * MIB) for _ in range(4)]
    with repo.writer() as writer:
        streams = []
        for number, content in enumerate(noise):
            stream = writer.stream(f"s{number}", "file")
            stream.write(0, content)
            streams.append(stream.close())
    commit(repo, streams[2])
    early = Repository.open(repo.url)
    with early.reader() as reader:
        reader.verify(streams[2:3])  # the index is known now
        report = prune(Repository.open(repo.url), max_unused=0)
        assert report.repacked_packs == 1
        assert reader.read(streams[2]) == noise[2]
        with pytest.raises(Exception, match="is in no index"):
            reader.read(streams[1])
    assert Checker(repo).run().problems == []


def test_a_damaged_lock_keeps_others_away_and_is_found(repo, tmp_path):
    lock = take(repo, LockKind.SHARED)
    path = tmp_path / "repo" / lock.name
    path.write_bytes(path.read_bytes().replace(b"shared", b"sharex"))
    assert [problem.name for problem in Checker(repo).run().problems] == [lock.name]
    with pytest.raises(RepositoryLockedError):
        take(repo, LockKind.SHARED)


def test_two_jobs_write_at_once(repo):
    contents = [os.urandom(6 * MIB) for _ in range(3)]
    common = os.urandom(6 * MIB)
    failures = []

    def job(number):
        try:
            mine = Repository.open(repo.url)
            with mine.writer() as writer:
                stream = writer.stream("s", "gpu-block")
                stream.write(0, common)
                stream.write(8 * MIB, contents[number])
                done = stream.close()
            mine.commit(
                Manifest(JobName(f"job{number}"), "suspend", ranks=[RankSection(0, "n", 1, [done])])
            )
        except Exception as error:  # noqa: BLE001  (shown below)
            failures.append(error)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    prune(repo, max_unused=0)
    for number in range(3):
        snapshot = repo.load("latest", job=f"job{number}")
        with repo.reader() as reader:
            data = reader.read(snapshot.streams[0])
        assert data == common + bytes(2 * MIB) + contents[number]
