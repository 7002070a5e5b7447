"""Files written through a mapping, by several threads."""

import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmig.errors import TorchmigError, UsageError
from torchmig.repo import JobName, Kind, Manifest, MappedFile, Mapping, RankSection, Repository

SIZE = 1 << 20
FORMS = [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))]


def memfd(size=SIZE):
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


@given(
    writes=st.lists(
        st.tuples(st.integers(0, SIZE), st.integers(0, 5000), st.sampled_from([None, *FORMS])),
        max_size=20,
    )
)
def test_bytes_of_any_form_arrive_where_they_belong(writes):
    fd = memfd()
    try:
        mapped, expected = MappedFile(fd, SIZE), bytearray(SIZE)
        for offset, size, form in writes:
            size = min(size, SIZE - offset)
            data = bytes(size) if form is None else random.Random(offset).randbytes(size)
            if form is None:
                mapped.write_zeros(offset, size)
            else:
                mapped.write(form(data), offset)
            expected[offset : offset + size] = data
        assert os.pread(fd, SIZE, 0) == expected
    finally:
        os.close(fd)


@pytest.mark.parametrize("offset", [-1, SIZE - 3, SIZE, 1 << 62])
def test_nothing_is_written_beyond_the_end(offset):
    fd = memfd()
    mapped = MappedFile(fd, SIZE)
    for attempt in (lambda: mapped.write(b"four", offset), lambda: mapped.write_zeros(offset, 4)):
        with pytest.raises(TorchmigError, match=f"cannot write 4 bytes at {offset}"):
            attempt()
    assert os.pread(fd, SIZE, 0) == bytes(SIZE)
    os.close(fd)


def test_an_empty_file_cannot_be_mapped():
    fd = memfd(0)
    with pytest.raises(TorchmigError, match="cannot map 0 bytes"):
        MappedFile(fd, 0)
    os.close(fd)


def test_the_mapping_ends_with_the_last_reference():
    fd = memfd()
    mapped = MappedFile(fd, SIZE)
    mapped.write(b"some", 0)
    assert "memfd:test" in Path("/proc/self/maps").read_text()
    del mapped
    gc.collect()
    assert "memfd:test" not in Path("/proc/self/maps").read_text()
    os.close(fd)


def test_a_stream_is_restored_from_threads_into_its_places(tmp_path):
    content = random.Random(1).randbytes(30 << 20)
    repository = Repository.open(str(tmp_path), create=True)
    with repository.writer() as writer:
        stream = writer.stream("x", Kind.GPU_BLOCK)
        stream.write(0, content)
        sections = [RankSection(0, "host", 1, [stream.close()])]
    snapshot = repository.commit(Manifest(JobName("job"), "suspend", ranks=sections))
    manifest = repository.load(snapshot)
    stored = manifest.ranks[0].streams[0]
    size, cut = len(content), 9_999_999  # in the middle of a chunk
    fd = memfd(size)
    mapped = MappedFile(fd, size)
    with repository.reader(manifest) as reader, ThreadPoolExecutor() as pool:
        parts = [Mapping(0, cut, size - cut), Mapping(cut, size - cut, 0)]
        list(pool.map(lambda part: reader.restore(stored, mapped, [part]), parts))
        with pytest.raises(UsageError, match="what goes where"):
            reader.restore(stored, mapped)
    assert os.pread(fd, size, 0) == content[cut:] + content[:cut]
    os.close(fd)
