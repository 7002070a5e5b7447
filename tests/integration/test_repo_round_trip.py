"""What goes into a repository comes out again, sparse, deduplicated and checked."""

import os
import random
import threading
from pathlib import Path

import pytest
from fault_store import CountingStore

from torchmig.errors import (
    IntegrityError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
    TorchmigError,
    UsageError,
)
from torchmig.repo import JobName, Manifest, Mapping, RankSection, Repository
from torchmig.store import FolderStore

KIB, MIB = 1 << 10, 1 << 20


def make_manifest(streams, name="train", **fields):
    return Manifest(
        job=JobName(name, f"{name}-1"),
        kind="suspend",
        ranks=[RankSection(rank=0, node="node0", pid=10_000, streams=streams)],
        **fields,
    )


@pytest.fixture
def repo(tmp_path):
    return Repository.open(str(tmp_path / "repo"), create=True)


def put_bytes(repo, *contents, kind="file"):
    with repo.writer() as writer:
        streams = []
        for number, content in enumerate(contents):
            stream = writer.stream(f"s{number}", kind)
            stream.write(0, content)
            streams.append(stream.close())
    return streams, writer.stats


@pytest.mark.parametrize("size", [1, 4095, 64 * KIB, MIB, MIB + 1, 5 * MIB + 17, 40 * MIB])
@pytest.mark.parametrize("kind", ["host-pages", "criu-image", "file", "gpu-block"])
def test_bytes_of_any_size_come_back(repo, tmp_path, size, kind):
    content = random.Random(size).randbytes(size)
    (stream,), stats = put_bytes(repo, content, kind=kind)
    assert stats.read_bytes == stats.new_bytes == size
    fresh = Repository.open(repo.url)
    snapshot = fresh.load(repo.commit(make_manifest([stream])))
    with fresh.reader() as reader:
        reader.restore(snapshot.streams[0], tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == content
        assert reader.read(snapshot.streams[0]) == content
        reader.verify(snapshot.streams)


def test_a_store_is_told_what_will_be_read(repo, tmp_path):
    """All of it, in the order of the stream, whatever order the threads read in."""
    content = random.Random(1).randbytes(100 * MIB)
    (stream,), _ = put_bytes(repo, content, kind="gpu-block")
    counting = CountingStore(FolderStore(tmp_path / "repo"))
    with Repository.on_store(counting).reader() as reader:
        packs = [reader.locate(stream, row).pack_id.hex() for row in reader.rows(stream)]
        reader.restore(stream, tmp_path / "out")
    of_data = [read for read in counting.reads if read[0].rpartition("/")[2] in packs]
    assert sorted(counting.expected) == sorted(of_data)
    told = [name.rpartition("/")[2] for name, _ in counting.expected]
    assert list(dict.fromkeys(told)) == list(dict.fromkeys(packs))
    assert (tmp_path / "out").read_bytes() == content


def test_files_are_private(repo):
    put_bytes(repo, b"x" * 100)
    for path in [Path(repo.url), *Path(repo.url).rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_sparse_writes_at_addresses(repo, tmp_path):
    """Pages at virtual addresses go in as they come and out through a mapping."""
    rng = random.Random(1)
    base = 0x7F00_0000_0000
    pages = [
        (base + at, rng.randbytes(size))
        for at, size in [
            (0x3000, 4096),
            (0x4000, 8192),
            (0x20000, 64 * KIB),
            (0x100000, 3 * MIB + 4096),
        ]
    ]
    with repo.writer() as writer:
        stream = writer.stream("pages-1.img", "host-pages")
        for address, content in pages:
            for at in range(0, len(content), 4096):
                stream.write(address + at, content[at : at + 4096])
        done = stream.close()
    mapping, at = [], 0
    for address, content in pages:
        mapping.append(Mapping(address, len(content), at))
        at += len(content)
    with repo.reader() as reader:
        extents = reader.extents(done)
        assert all(e.offset_bytes % (64 * KIB) + e.size_bytes <= 64 * KIB for e in extents)
        got = bytearray(at)
        assert [offset for offset, _ in reader.chunks(done)] == [e.offset_bytes for e in extents]
        with (tmp_path / "pages").open("w+b") as file:
            reader.restore(done, file.fileno(), mapping)
            got = file.seek(0) or file.read()
        assert got == b"".join(content for _, content in pages)
        assert (
            reader.read_range(done, base + 0x3800, 0x1000)
            == pages[0][1][2048:] + pages[1][1][:2048]
        )


def test_zeros_cost_nothing_and_stay_holes(repo, tmp_path):
    with repo.writer() as writer:
        stream = writer.stream("sparse", "file", mode=0o640)
        stream.write(0, bytes(8 * MIB))
        stream.write(8 * MIB, b"end")
        done = stream.close(64 * MIB)
    assert writer.stats.zero_bytes == 8 * MIB
    assert writer.stats.stored_bytes < 1000
    assert done.data_bytes == 3
    with repo.reader() as reader:
        reader.restore(done, tmp_path / "out")
    status = (tmp_path / "out").stat()
    assert status.st_size == 64 * MIB
    assert status.st_blocks * 512 < 2 * MIB
    assert status.st_mode & 0o777 == 0o640


def test_equal_bytes_once(repo):
    content = random.Random(2).randbytes(12 * MIB)
    _, first = put_bytes(repo, content, content, kind="gpu-block")
    assert first.stored_bytes <= 1.05 * len(content)
    assert first.duplicate_bytes == len(content)
    _, second = put_bytes(Repository.open(repo.url), content, kind="gpu-block")
    assert second.new_bytes == second.stored_bytes == 0


def test_buffer_may_be_reused_after_write(repo):
    rng = random.Random(3)
    buffer, expected = bytearray(MIB // 2), []
    with repo.writer() as writer:
        stream = writer.stream("s", "file")
        for number in range(40):
            buffer[:] = rng.randbytes(len(buffer))
            expected.append(bytes(buffer))
            stream.write(number * len(buffer), buffer)
        done = stream.close()
    with repo.reader() as reader:
        assert reader.read(done) == b"".join(expected)


def test_an_error_inside_the_block_commits_nothing(repo):
    def write_and_fail():
        with repo.writer() as writer:
            writer.stream("s", "file").write(0, b"x" * MIB)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_and_fail()
    assert repo.snapshots() == []


def test_commit_refuses_blobs_that_nobody_stored(repo, tmp_path):
    other = Repository.open(str(tmp_path / "other"), create=True)
    (stream,), _ = put_bytes(other, b"elsewhere")
    with pytest.raises(IntegrityError, match="not in"):
        repo.commit(make_manifest([stream]))
    assert repo.snapshots() == []


def test_another_process_may_commit(repo):
    """Agents write on their nodes; the coordinator commits with its own view of the index."""
    coordinator = Repository.open(repo.url)
    with coordinator.writer() as writer:
        stream = writer.stream("mine", "file")
        stream.write(0, b"mine")
        mine = stream.close()
    (theirs,), _ = put_bytes(repo, os.urandom(MIB))
    section = RankSection.from_dict(RankSection(1, "b", 7, [theirs], {"groups": []}).to_dict())
    manifest = make_manifest([mine])
    manifest.ranks.append(section)
    coordinator.commit(manifest)
    assert [s.world_size for s in Repository.open(repo.url).snapshots()] == [2]


def test_names_of_snapshots(repo):
    with pytest.raises(SnapshotNotFoundError, match="no snapshot"):
        repo.load("latest")
    ids = [repo.commit(make_manifest([], name=f"job{n % 2}")) for n in range(20)]
    assert repo.load("latest").id == ids[-1]
    assert repo.load("latest", job="job0").id == ids[-2]
    assert repo.load(ids[3][:16]).id == ids[3]
    assert [s.id for s in repo.snapshots()] == ids
    first = [snapshot_id[0] for snapshot_id in ids]
    shared = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(SnapshotNotFoundError, match="ambiguous"):
        repo.load(shared)
    with pytest.raises(SnapshotNotFoundError, match="no snapshot"):
        repo.load("xyz")


def test_no_repository(tmp_path):
    with pytest.raises(RepositoryNotFoundError):
        Repository.open(str(tmp_path / "nothing"))
    with pytest.raises(RepositoryNotFoundError):
        Repository.open(str(tmp_path))
    (tmp_path / "file").write_text("x")
    for create in (False, True):
        with pytest.raises(UsageError, match="is a file"):
            Repository.open(str(tmp_path / "file"), create=create)


def test_a_changed_byte_anywhere_in_a_pack_is_found(repo, tmp_path):
    text = b"compressible text, again and again " * 4000
    (stream,), _ = put_bytes(repo, text + random.Random(4).randbytes(MIB))
    snapshot_id = repo.commit(make_manifest([stream]))
    (pack,) = (p for p in (tmp_path / "repo" / "data").rglob("*") if p.is_file())
    good = pack.read_bytes()
    fresh = Repository.open(repo.url)
    snapshot = fresh.load("latest")
    blobs_end = len(good) - 12 - 42 * len(snapshot.streams[0].extents)
    rng = random.Random(5)
    places = [0, 1, 15, 16, 20, 21, blobs_end - 1, *(rng.randrange(blobs_end) for _ in range(60))]
    for number, at in enumerate(places):
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        pack.write_bytes(bad)
        with fresh.reader() as reader, pytest.raises(IntegrityError) as caught:
            reader.restore(snapshot.streams[0], tmp_path / f"out{number}")
        assert snapshot_id[:8] in str(caught.value)
        assert pack.name in str(caught.value)
    pack.write_bytes(good[:1000])
    with fresh.reader() as reader, pytest.raises(IntegrityError, match="damaged"):
        reader.read(snapshot.streams[0])
    pack.unlink()
    with fresh.reader() as reader, pytest.raises(IntegrityError, match="missing"):
        reader.read(snapshot.streams[0])


def test_a_damaged_manifest_is_refused_and_left_out_of_the_list(repo, tmp_path):
    good, bad = repo.commit(make_manifest([])), repo.commit(make_manifest([], name="other"))
    path = tmp_path / "repo" / "snapshots" / bad
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(IntegrityError, match=bad[:8]):
        repo.load(bad)
    assert [s.id for s in repo.snapshots()] == [good]


@pytest.mark.parametrize("kind", ["host-pages", "file", "gpu-block"])
def test_parts_of_files_at_addresses(repo, tmp_path, kind):
    """As CRIU's pages file: runs of it belong at addresses; some are next to one another."""
    rng = random.Random(7)
    runs = [
        (0x1000, 4096),
        (0x2000, 300 * KIB),
        (0x2000 + 300 * KIB, 9 * MIB + 4096),
        (0x7F0000001000, MIB),
        (0x7F0010000000, 20 * MIB),
        (0x7F0020000000, 5),
    ]
    content = rng.randbytes(sum(size for _, size in runs))
    (tmp_path / "pages").write_bytes(content)
    with repo.writer() as writer, (tmp_path / "pages").open("rb") as file:
        stream = writer.stream("pages", kind)
        start = 0
        for address, size in runs:
            stream.write_file(address, file.fileno(), start, size)
            start += size
        done = stream.close()
        plain = writer.stream("plain", kind)
        start = 0
        for address, size in runs:
            plain.write(address, content[start : start + size])
            start += size
        same = plain.close()
    assert (same.extents, same.trees) == (done.extents, done.trees)
    assert writer.stats.new_bytes == len(content)
    mapping, start = [], 0
    for address, size in runs:
        mapping.append(Mapping(address, size, start))
        start += size
    with repo.reader() as reader, (tmp_path / "out").open("w+b") as file:
        reader.restore(done, file.fileno(), mapping)
        assert file.read() == content


def test_a_file_that_is_too_short(repo, tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 5 * MIB)

    def store(size):
        with repo.writer() as writer, (tmp_path / "short").open("rb") as file:
            stream = writer.stream("short", "file")
            stream.write_file(0, file.fileno(), 0, size)
            stream.close()

    for size in (5 * MIB + 1, 6 * MIB, 50 * MIB):
        with pytest.raises(TorchmigError, match=r"ends before|shorter"):
            store(size)


def threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("torchmig")]


def test_threads_live_inside_the_blocks_only(repo):
    """So that the process may fork whenever no block is open."""
    content = random.Random(9).randbytes(80 * MIB)
    with repo.writer() as writer:
        assert threads()
        stream = writer.stream("s", "host-pages")
        stream.write(0, content)
        done = stream.close()
    assert threads() == []
    with repo.reader() as reader:
        assert threads() == []
        chunks = reader.chunks(done)
        next(chunks)
        assert threads()
        chunks.close()  # given up halfway
        assert threads() == []
        assert b"".join(bytes(chunk) for _, chunk in reader.chunks(done)) == content
    assert threads() == []


def test_several_threads_write_and_read_at_once(repo):
    contents = [random.Random(n).randbytes(3 * MIB + n) for n in range(6)]
    done, failures = {}, []

    def work(number):
        try:
            stream = writer.stream(f"s{number}", "file")
            for at in range(0, len(contents[number]), 100_000):
                stream.write(at, contents[number][at : at + 100_000])
            done[number] = stream.close()
        except Exception as error:  # noqa: BLE001  (shown below)
            failures.append(error)

    def read(number):
        try:
            assert reader.read(done[number]) == contents[number]
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    def side_by_side(action):
        running = [threading.Thread(target=action, args=(number,)) for number in range(6)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    with repo.writer() as writer:
        side_by_side(work)
    with repo.reader() as reader:
        side_by_side(read)
    assert failures == []
    assert len(done) == 6
    assert writer.stats.new_bytes == sum(map(len, contents))


def test_many_snapshots_are_listed_and_indexed(repo):
    """Each writer leaves an index object and each commit a manifest; both are read side by side."""
    ids = []
    for number in range(70):
        (stream,), _ = put_bytes(repo, (number + 1).to_bytes(4, "big") * 100)
        ids.append(repo.commit(make_manifest([stream])))
    fresh = Repository.open(repo.url)
    assert [summary.id for summary in fresh.snapshots()] == ids
    assert len(fresh.index()) == 70
    for snapshot_id in (ids[0], ids[-1]):
        with fresh.reader() as reader:
            reader.verify(fresh.load(snapshot_id).streams)
    assert threads() == []
