"""GPU blocks through a repository: same bytes back, equal blocks stored once, wherever they lie."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.capture.device import blocks as gpu_blocks
from torchmig.capture.device.staging import Staging
from torchmig.capture.device.windows import Block, windows
from torchmig.errors import IntegrityError, SnapshotUnfitError
from torchmig.repo import JobName, Manifest, MappedFile, RankSection, Repository

MIB = 1 << 20


def fill(staging, blocks, contents):
    (pieces,) = windows(blocks, staging.size_bytes)
    with staging.view() as view:
        for piece in pieces:
            data = contents[piece.block][piece.block_offset :][: piece.size_bytes]
            view[piece.offset : piece.offset + piece.size_bytes] = data
    return pieces


def bytes_in(staging, pieces, count):
    found = [bytearray() for _ in range(count)]
    with staging.view() as view:
        for piece in pieces:
            found[piece.block] += view[piece.offset : piece.offset + piece.size_bytes]
    return [bytes(data) for data in found]


def commit(repository, ranks):
    """Store the blocks of each rank: (blocks, contents); return manifest and new bytes."""
    sections = []
    with repository.writer() as writer:
        for rank, (blocks, contents) in enumerate(ranks):
            with Staging(64 * MIB) as staging:
                pieces = fill(staging, blocks, contents)
                streams = gpu_blocks.store(writer, blocks, pieces, staging.fd, f"rank-{rank}/")
            sections.append(RankSection(rank, "host", 1, streams))
    manifest = Manifest(JobName("job"), "suspend", ranks=sections)
    return repository.load(repository.commit(manifest)), writer.stats.new_bytes


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9 * MIB), min_size=1, max_size=6),
    devices=st.lists(st.integers(0, 1), min_size=6, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_what_goes_in_comes_out(tmp_path_factory, sizes, devices, seed):
    repository = Repository.open(str(tmp_path_factory.mktemp("repo")), create=True)
    noise = random.Random(seed)
    blocks = [Block(devices[n], n << 32, size) for n, size in enumerate(sizes)]
    contents = [noise.choice([noise.randbytes, bytes])(size) for size in sizes]
    manifest, _ = commit(repository, [(blocks, contents)])
    stored = gpu_blocks.StoredBlocks(blocks, manifest.ranks[0].streams, "rank-0/")
    with Staging(64 * MIB) as staging:
        (pieces,) = windows(blocks, staging.size_bytes)
        with staging.view() as view:
            view[:] = b"\xff" * len(view)
        with repository.reader(manifest) as reader:
            for some in (pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]):
                stored.bring(reader, some, MappedFile(staging.fd, staging.size_bytes))
        assert bytes_in(staging, pieces, len(blocks)) == contents


def test_equal_blocks_of_two_ranks_are_stored_once(tmp_path):
    repository = Repository.open(str(tmp_path), create=True)
    contents = [os.urandom(9 * MIB + 3), os.urandom(70_000)]
    one = [Block(0, 0, len(contents[0])), Block(0, 1 << 30, len(contents[1]))]
    # The second rank has them elsewhere, in another order, behind a block of its own.
    own = os.urandom(12_345)
    others = [own, contents[1], contents[0]]
    two = [Block(1, number << 40, len(data)) for number, data in enumerate(others)]
    _, new_bytes = commit(repository, [(one, contents), (two, others)])
    assert new_bytes == sum(map(len, contents)) + len(own)


def test_a_snapshot_without_the_stream_is_damaged(tmp_path):
    repository = Repository.open(str(tmp_path), create=True)
    manifest, _ = commit(repository, [([Block(0, 0, 10)], [b"0123456789"])])
    streams = manifest.ranks[0].streams
    with pytest.raises(IntegrityError, match="lacks the stream 'rank-0/gpu/3'"):
        gpu_blocks.StoredBlocks([Block(3, 0, 10)], streams, "rank-0/")


@pytest.mark.parametrize("state", [None, {}, [[1, 2]], [[1, 2, "3"]], [[True, 2, 3]], [1]])
def test_blocks_of_a_manifest_are_checked(state):
    with pytest.raises(SnapshotUnfitError):
        gpu_blocks.from_state(state)


def test_blocks_go_through_a_manifest():
    blocks = [Block(0, 1 << 45, 7), Block(1, 2, 3)]
    assert gpu_blocks.from_state(gpu_blocks.to_state(blocks)) == blocks
