"""Plans of reads: everything that is wanted, nothing twice, few and bounded requests."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.errors import IntegrityError
from torchmig.repo.blob import hash_of
from torchmig.repo.extents import Extent, check_extents, decode_tree, encode_trees
from torchmig.repo.index import Index
from torchmig.repo.pack import ENTRY
from torchmig.repo.plan import plan_reads
from torchmig.repo.reader import Mapping, _targets

KIB = 1 << 10


def blob(number):
    return number.to_bytes(32, "big")


def index_of(*packs):
    """An index over packs given as lists of (blob number, size)."""
    index = Index()
    for rows in packs:
        header = b"".join(ENTRY.pack(blob(n), 0, 0, size, size) for n, size in rows)
        index.add_pack(hash_of(header), header)
    return index


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=40))
    cuts = sorted(draw(st.sets(st.integers(0, len(sizes)), max_size=4)) | {0, len(sizes)})
    numbered = list(enumerate(sizes))
    packs = [numbered[a:b] for a, b in itertools.pairwise(cuts) if a < b]
    wanted = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=60))
    extents, offset = [], 0
    for number in wanted:
        extents.append((offset, sizes[number], blob(number)))
        offset += sizes[number]
    return packs, extents, draw(st.sampled_from([1, 64 * KIB, KIB * KIB, 64 * KIB * KIB]))


@given(cases())
@settings(deadline=None)
def test_plans(case):
    packs, extents, max_read = case
    index = index_of(*packs)
    reads = plan_reads(index, extents, max_read)
    served = {}
    for read in reads:
        assert read.size_bytes <= max(max_read, max(b.stored_bytes for b in read.blobs))
        for wanted in read.blobs:
            location = index.find(wanted.blob_id)
            assert location[1:] == wanted[1:2] + wanted[2:5]
            assert read.offset_bytes <= wanted.offset_bytes
            end = wanted.offset_bytes + wanted.stored_bytes
            assert end <= read.offset_bytes + read.size_bytes
            for offset in wanted.offsets:
                assert offset not in served
                served[offset] = wanted.blob_id
    assert served == {offset: blob_id for offset, _, blob_id in extents}
    ids = [wanted.blob_id for read in reads for wanted in read.blobs]
    assert len(ids) == len(set(ids))
    if max_read >= 64 * KIB * KIB:
        # One request for each pack, but where it would read over a long gap.
        gaps = sum(size > 200 * KIB for rows in packs for _, size in rows)
        assert len(reads) <= len(packs) + gaps + sum(s for r in packs for _, s in r) // (256 * KIB)


def test_unknown_blobs_and_wrong_sizes():
    index = index_of([(1, 100)])
    with pytest.raises(IntegrityError, match="is in no index"):
        plan_reads(index, [(0, 100, blob(2))], 1)
    with pytest.raises(IntegrityError, match="has 100 bytes, not 99"):
        plan_reads(index, [(0, 99, blob(1))], 1)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 4 << 20)), max_size=50))
def test_trees_round_trip(gaps):
    extents, end = [], 0
    for gap, size in gaps:
        extents.append((end + gap, size, blob(size)))
        end += gap + size
    decoded = [row for tree in encode_trees(extents) for row in decode_tree(tree)]
    assert decoded == extents
    check_extents(extents, end)


def test_long_streams_take_several_trees():
    extents = [(n << 16, 1 << 16, blob(n)) for n in range(10_000)]
    trees = list(encode_trees(extents))
    assert len(trees) == 3
    assert [row for tree in trees for row in decode_tree(tree)] == extents


@pytest.mark.parametrize("tree", [b"", b"\1\0\0", b"\1\0\0\0", b"\xff\xff\xff\xff" + bytes(44)])
def test_broken_trees(tree):
    with pytest.raises(IntegrityError, match="tree blob"):
        decode_tree(tree)


@pytest.mark.parametrize(
    "extents",
    [
        [Extent(0, 10, blob(1)), Extent(5, 10, blob(1))],
        [Extent(10, 10, blob(1)), Extent(0, 10, blob(1))],
        [Extent(95, 10, blob(1))],
        [Extent(0, 0, blob(1))],
        [Extent(0, 1 << 30, blob(1))],
        [Extent(0, 10, b"short")],
    ],
)
def test_extents_that_cannot_be(extents):
    with pytest.raises(IntegrityError):
        check_extents(extents, 100)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=20),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 80)), max_size=20),
)
def test_mappings(gaps, pieces):
    """Each byte that a mapping names goes to its place, each other one nowhere."""
    extents, end = [], 0
    for gap, size in gaps:
        extents.append((end + gap, size, b""))
        end += gap + size
    mapping, at, target = [], 0, 0
    for gap, size in pieces:
        mapping.append(Mapping(at + gap, size, target))
        at += gap + size
        target += size
    got = {}
    for offset, parts in _targets(extents, mapping).items():
        for start, stop, place in parts:
            for step in range(stop - start):
                assert place + step not in got
                got[place + step] = offset + start + step
    stored = {o + n for o, size, _ in extents for n in range(size)}
    expected = {
        m.target_bytes + n: m.offset_bytes + n
        for m in mapping
        for n in range(m.size_bytes)
        if m.offset_bytes + n in stored
    }
    assert got == expected
