"""GPU blocks that are read ahead through a staging smaller than they are."""

import random
import threading
from contextlib import contextmanager

import pytest
from arriving import digests, take
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.agent.inflow import Arrivals, Inflow, Lane, in_this_process
from torchmig.capture.device.blocks import StoredBlocks, place
from torchmig.capture.device.staging import Staging
from torchmig.capture.device.windows import PIECE_BYTES, Block, Ring
from torchmig.errors import IntegrityError
from torchmig.repo import JobName, Kind, Manifest, RankSection, Repository

MIB = 1 << 20
SMALL = 2 * PIECE_BYTES  # a lane of one slot


def store(repository, ranks):
    """Commit each rank's blocks; return the snapshot."""
    sections = []
    with repository.writer() as writer:
        for rank, contents in enumerate(ranks):
            stream = writer.stream(f"rank-{rank}/gpu/0", Kind.GPU_BLOCK)
            for placed, data in zip(place(blocks_of(contents)), contents, strict=True):
                stream.write(placed.stream_offset, data)
            sections.append(RankSection(rank, "host", 1, [stream.close()]))
    return repository.load(repository.commit(Manifest(JobName("job"), "suspend", ranks=sections)))


def sizes_of(contents):
    return [len(data) for data in contents]


def blocks_of(contents):
    return [Block(0, number << 32, len(data)) for number, data in enumerate(contents)]


class Way:
    """Both halves of a rank's way, in one process."""

    def __init__(self, manifest, rank, contents, staging, size=SMALL):
        blocks = blocks_of(contents)
        stored = StoredBlocks(blocks, manifest.ranks[rank].streams, f"rank-{rank}/")
        ring = Ring.lay_out(blocks, size)
        staging.grow(ring.size_bytes)
        self.arrivals = Arrivals(ring, lambda: self.lane.empty(), lambda: self.lane.close())
        self.lane = Lane(stored, ring, staging.fd, self.arrivals.filled)


def start(ways, reading):
    def fail(error):
        for way in ways:
            way.arrivals.fail(error)

    lanes = [way.lane for way in ways]
    inflow = Inflow(lanes, lambda: in_this_process(lanes, reading), fail)
    inflow.start()
    return inflow


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12 * MIB), min_size=1, max_size=5),
    lane_bytes=st.sampled_from([1, SMALL, 3 * SMALL, 8 * SMALL]),
    seed=st.integers(0, 1 << 30),
)
def test_all_arrives_through_any_staging(tmp_path_factory, sizes, lane_bytes, seed):
    """Two ranks, parts of whose blocks are zero, one slow; staging is dirty and used again."""
    noise = random.Random(seed)
    ranks = [
        [
            b"".join(noise.choice([noise.randbytes, bytes])(size // 4 + 1) for _ in range(4))
            for size in sizes
        ]
        for _ in range(2)
    ]
    repository = Repository.open(str(tmp_path_factory.mktemp("repo")), create=True)
    manifest = store(repository, ranks)
    with Staging(64 * MIB) as first, Staging(64 * MIB) as second:
        for staging in (first, second):
            with staging.view() as view:
                view[:] = b"\xff" * len(view)
        both = [
            Way(manifest, rank, ranks[rank], staging, lane_bytes)
            for rank, staging in enumerate((first, second))
        ]
        start(both, lambda: repository.reader(manifest))
        slow = []
        lengths = sizes_of(ranks[0])  # of both
        thread = threading.Thread(
            target=lambda: slow.append(take(both[1].arrivals, second, lengths, pause=0.01))
        )
        thread.start()
        assert take(both[0].arrivals, first, lengths) == digests(ranks[0])
        thread.join()
        assert slow == [digests(ranks[1])]


def test_reading_stops_where_staging_is_full_and_ends_with_the_lanes(tmp_path):
    repository = Repository.open(str(tmp_path), create=True)
    contents = [random.Random(3).randbytes(40 * MIB)]
    manifest = store(repository, [contents])
    with Staging(0) as staging:
        way = Way(manifest, 0, contents, staging, 2 * SMALL)
        inflow = start([way], lambda: repository.reader(manifest))
        next(iter(way.arrivals))
        inflow.join(0.5)
        assert inflow.is_alive()
        with staging.view() as view:
            assert len(view) == 2 * SMALL
        way.arrivals.close()
        inflow.join(30)
        assert not inflow.is_alive()


def test_what_is_there_is_taken_at_once_and_up_to_the_end_of_staging():
    ring = Ring.lay_out([Block(0, 0, 10 * SMALL)], 4 * SMALL)
    assert (len(ring.windows), ring.slots) == (10, 4)
    emptied = []
    arrivals = Arrivals(ring, lambda: emptied.append(None), lambda: None)
    for _ in range(3):
        arrivals.filled()
    taking = iter(arrivals)
    assert reach(next(taking)) == (0, 3 * SMALL)
    for _ in range(4):
        arrivals.filled()
    assert reach(next(taking)) == (3 * SMALL, 4 * SMALL)
    assert len(emptied) == 3
    pieces = next(taking)
    assert reach(pieces) == (4 * SMALL, 7 * SMALL)
    assert [piece.offset for piece in pieces] == sorted(piece.offset for piece in pieces)
    for _ in range(3):
        arrivals.filled()
    assert [reach(pieces) for pieces in taking] == [
        (7 * SMALL, 8 * SMALL),
        (8 * SMALL, 10 * SMALL),
    ]
    assert len(emptied) == 10


def reach(pieces):
    """Return from where to where in their only block pieces reach."""
    return pieces[0].block_offset, pieces[-1].block_offset + pieces[-1].size_bytes


def test_damage_reaches_whoever_waits(tmp_path):
    repository = Repository.open(str(tmp_path), create=True)
    contents = [random.Random(3).randbytes(20 * MIB)]
    manifest = store(repository, [contents])
    for pack in (tmp_path / "data").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    with Staging(0) as staging:
        way = Way(manifest, 0, contents, staging)
        start([way], lambda: repository.reader(manifest))
        with pytest.raises(IntegrityError, match=r"'rank-0/gpu/0' of snapshot .* is damaged"):
            list(way.arrivals)
        way.arrivals.close()


def test_a_window_that_is_there_before_the_one_before_it_is_told_after_it(tmp_path):
    """The next window is read while the last bytes of one are still on their way."""
    repository = Repository.open(str(tmp_path), create=True)
    contents = [random.Random(3).randbytes(40 * MIB)]
    manifest = store(repository, [contents])
    second_is_there = threading.Event()
    with Staging(0) as staging:
        way = Way(manifest, 0, contents, staging, 4 * SMALL)

        @contextmanager
        def reading():
            with repository.reader(manifest) as reader:
                original = reader.restore

                def restore(stream, fd, mappings, rows):
                    if mappings[0].offset_bytes == 0:
                        assert second_is_there.wait(30)
                    original(stream, fd, mappings, rows)
                    if mappings[0].offset_bytes == SMALL:
                        second_is_there.set()

                reader.restore = restore
                yield reader

        start([way], reading)
        assert take(way.arrivals, staging, sizes_of(contents)) == digests(contents)


def test_closing_waits_for_the_window_under_way(tmp_path):
    """Its descriptor may be another file's as soon as staging is closed."""
    repository = Repository.open(str(tmp_path), create=True)
    contents = [random.Random(3).randbytes(8 * MIB)]
    manifest = store(repository, [contents])
    begun, go_on = threading.Event(), threading.Event()
    with Staging(0) as staging:
        way = Way(manifest, 0, contents, staging)

        @contextmanager
        def reading():
            with repository.reader(manifest) as reader:
                original = reader.restore

                def restore(*arguments):
                    begun.set()
                    assert go_on.wait(30)
                    original(*arguments)

                reader.restore = restore
                yield reader

        inflow = start([way], reading)
        assert begun.wait(30)
        closing = threading.Thread(target=way.arrivals.close)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        go_on.set()
        closing.join(30)
        assert not closing.is_alive()
        inflow.join(30)
