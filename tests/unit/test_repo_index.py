"""The index finds every blob where its pack says, in little memory."""

import random
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.errors import IntegrityError
from torchmig.repo.blob import MAX_BLOB_BYTES, hash_of
from torchmig.repo.index import Index, decode_index, encode_index
from torchmig.repo.pack import ENTRY, PackBuilder, header_length, pack_name, parse_header

entries = st.lists(
    st.tuples(
        st.binary(min_size=32, max_size=32),
        st.integers(0, 4),
        st.integers(0, 3),
        st.integers(1, MAX_BLOB_BYTES),
        st.integers(1, MAX_BLOB_BYTES),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda entry: entry[0],
)


def header_of(rows):
    return b"".join(ENTRY.pack(*row) for row in rows)


@given(st.lists(entries, min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_every_blob_is_found_where_it_lies(packs):
    index, expected = Index(), {}
    for rows in packs:
        header = header_of(rows)
        index.add_pack(hash_of(header), header)
        offset = 0
        for blob_id, _, codec, size, stored in rows:
            expected.setdefault(blob_id, set()).add((hash_of(header), offset, stored, size, codec))
            offset += stored
    for blob_id, places in expected.items():
        assert tuple(index.find(blob_id)) in places
        assert blob_id in index
    assert len(index) == len(expected)
    assert index.find(b"?" * 32) is None


def test_memory_for_each_blob():
    rng = random.Random(1)
    count, index = 200_000, Index()
    headers = [
        header_of([(rng.randbytes(32), 0, 1, 65536, 40000) for _ in range(500)])
        for _ in range(count // 500)
    ]
    tracemalloc.start()
    for header in headers:
        index.add_pack(hash_of(header), header)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == count
    assert used / count < 200


def test_index_objects_round_trip():
    packs = [
        (hash_of(h), h) for h in (header_of([(bytes([n]) * 32, 0, 0, 5, 5)]) for n in range(9))
    ]
    name, data = encode_index(packs)
    assert list(decode_index(name, data)) == packs
    with pytest.raises(IntegrityError, match="rebuild-index"):
        list(decode_index(name, data + b"x"))


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        5,
        {"version": 2, "packs": []},
        {"version": 1, "packs": 5},
        {"version": 1, "packs": [5]},
        {"version": 1, "packs": [[b"x", b"y"]]},
        {"version": 1, "packs": [[b"x" * 32]]},
        {"version": 1, "packs": [["x" * 32, b"y"]]},
    ],
)
def test_documents_of_another_form_are_refused(document):
    data = msgpack.packb(document)
    with pytest.raises(IntegrityError):
        list(decode_index(f"index/{hash_of(data).hex()}", data))


@pytest.mark.parametrize(
    "row",
    [
        (b"a" * 32, 0, 0, MAX_BLOB_BYTES + 1, 5),
        (b"a" * 32, 0, 0, 5, MAX_BLOB_BYTES + 1),
        (b"a" * 32, 0, 16, 5, 5),
    ],
)
def test_blobs_beyond_the_limits_are_refused(row):
    header = header_of([row])
    with pytest.raises(IntegrityError, match="limits"):
        Index().add_pack(hash_of(header), header)


def test_a_header_must_match_its_name():
    header = header_of([(b"a" * 32, 0, 0, 5, 5)])
    with pytest.raises(IntegrityError, match="does not match"):
        Index().add_pack(hash_of(header + b"x"), header)
    with pytest.raises(IntegrityError):
        Index().add_pack(hash_of(header[:-1]), header[:-1])


def test_a_pack_is_read_as_it_was_built():
    builder = PackBuilder(bytearray(1000))
    assert builder.is_empty
    payloads = [b"first", b"second one", b"x" * 500]
    for payload in payloads:
        builder.add(2, hash_of(payload), len(payload), 0, payload)
    assert not builder.has_room(1000 - builder.size_bytes + 1)
    assert builder.has_room(1000 - builder.size_bytes)
    pack = builder.seal()
    data = b"".join(pack.parts)
    assert len(data) == pack.size_bytes
    length = header_length(data[-12:], pack.name)
    header = data[-12 - length : -12]
    assert pack.name == pack_name(hash_of(header))
    found = list(parse_header(header, pack.pack_id))
    assert [data[e.offset_bytes :][: e.stored_bytes] for e in found] == payloads


@pytest.mark.parametrize("trailer", [b"", b"x" * 12, b"\0" * 4 + b"TMIGPK02", b"TMIGPK01"])
def test_ends_of_other_files_are_refused(trailer):
    with pytest.raises(IntegrityError, match="does not end as a pack does"):
        header_length(trailer, "data/ab/abcd")
