"""The manifest's form: canonical, complete, and suspicious of everything it reads."""

import random
import string
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.errors import IntegrityError, SnapshotUnfitError, TorchmigError
from torchmig.repo import Extent, JobName, Manifest, RankSection, Stream, target_path
from torchmig.repo.blob import hash_of
from torchmig.repo.manifest import check_stream_name, decode_manifest, load_manifest, snapshot_name

texts = st.text(st.characters(codec="utf-8"), max_size=30)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)
documents = st.dictionaries(texts, values, max_size=5)
names = st.lists(st.text(string.ascii_letters + "._-é ", min_size=1, max_size=9), min_size=1).map(
    "/".join
)
names = names.filter(lambda name: not {".", ".."} & set(name.split("/")))
ids = st.binary(min_size=32, max_size=32)


@st.composite
def streams(draw):
    sizes = draw(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 4 << 20)), max_size=4))
    extents, end = [], 0
    for gap, size in sizes:
        extents.append(Extent(end + gap, size, draw(ids)))
        end += gap + size
    return Stream(
        name=draw(names),
        kind=draw(st.sampled_from(["host-pages", "criu-image", "file", "gpu-block"])),
        mode=draw(st.integers(0, 0o7777)),
        size_bytes=end + draw(st.integers(0, 2**40)),
        data_bytes=sum(size for _, size in sizes),
        extent_count=len(extents),
        extents=tuple(extents),
    )


@st.composite
def manifests(draw):
    return Manifest(
        job=JobName(draw(texts), draw(texts)),
        kind=draw(st.sampled_from(["suspend", "checkpoint"])),
        launch=draw(documents),
        environment=draw(documents),
        nodes=draw(st.lists(documents, max_size=2)),
        ranks=[
            RankSection(number, draw(texts), 10, draw(st.lists(streams(), max_size=3)), {"a": 1})
            for number in range(draw(st.integers(0, 3)))
        ],
        store_keys=draw(documents),
        report=draw(documents),
        tags=sorted(set(draw(st.lists(texts, max_size=3)))),
    )


@given(manifests())
@settings(max_examples=60, deadline=None)
def test_round_trip(manifest):
    data = manifest.encode()
    again = decode_manifest(data, "x")
    assert again == manifest
    assert again.encode() == data


@given(documents, st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_keys_does_not_matter(document, rng):
    keys = list(document)
    rng.shuffle(keys)
    shuffled = {key: document[key] for key in keys}
    first = Manifest(JobName("j"), "suspend", created="2026-01-31T12:00:00.000000Z")
    assert replace(first, launch=document).encode() == replace(first, launch=shuffled).encode()


@given(streams())
@settings(max_examples=60, deadline=None)
def test_sections_travel_between_agents(stream):
    section = RankSection(3, "node", 5, [stream], {"step": 1})
    wire = msgpack.packb(section.to_dict())
    assert RankSection.from_dict(msgpack.unpackb(wire)) == section


def sample():
    extents = tuple(Extent(n << 20, 1 << 20, bytes([n]) * 32) for n in range(3))
    stream = Stream("a/b", "file", 0o600, 5 << 20, 3 << 20, 3, extents)
    tree = Stream("t", "host-pages", 0o600, 1 << 40, 1 << 30, 9999, (), (b"t" * 32,))
    return Manifest(
        JobName("job", "id"),
        "suspend",
        launch={"argv": ["a", "b"], "world_size": 2},
        environment={"torch": "2.13"},
        nodes=[{"name": "n"}],
        ranks=[RankSection(n, "n", 1, [stream, tree], {"files": [{"path": "/x"}]}) for n in (0, 1)],
        store_keys={"k": b"v"},
        report={"t": 1.5},
        tags=["x"],
    )


def walk(document, path=()):
    yield path
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key)


WRONG = [None, -1, 2**64 - 1, "x", "../../etc/passwd", "/etc/passwd", b"", [], {}, True, 1.5,
         ["a"] * 5, {"version": 1}, [[0, 1, b"x"]], [[-1, 1, b"x" * 32]], "a" * 5000]  # fmt: skip


def read_and_use(data):
    """Read a manifest as every reader does, and join its names to a folder."""
    manifest = decode_manifest(data, "the manifest")
    folder = Path("/safe/target")
    for stream in manifest.streams:
        path = target_path(folder, stream.name)
        assert folder in path.parents
        assert ".." not in path.parts
        assert 0 <= stream.size_bytes < 2**63
        assert stream.mode <= 0o7777


def test_mutated_manifests_give_a_clear_error_or_a_safe_manifest():
    """10,000 damaged manifests: bits flipped, cut short, spliced, and fields replaced."""
    good = sample().encode()
    document = msgpack.unpackb(good)
    paths = [path for path in walk(document) if path]
    rng = random.Random(20260131)
    tracemalloc.start()
    messages = []
    for number in range(10_000):
        how = number % 5
        if how == 0:
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif how == 1:
            data = good[: rng.randrange(len(good))]
        elif how == 2:
            start = rng.randrange(len(good))
            data = good[:start] + rng.randbytes(rng.randint(1, 9)) + good[start:]
        elif how == 3:
            data = rng.randbytes(rng.randint(0, 200))
        else:
            changed = msgpack.unpackb(good)
            *parents, last = rng.choice(paths)
            place = changed
            for key in parents:
                place = place[key]
            if rng.random() < 0.2 and isinstance(place, dict):
                del place[last]
            else:
                place[last] = rng.choice(WRONG)
            data = msgpack.packb(changed)
        try:
            read_and_use(bytes(data))
        except (IntegrityError, SnapshotUnfitError) as error:
            messages.append(str(error))
        if number == 1000:  # tracing all of them would take minutes
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert len(messages) > 6000
    clear = ("the manifest is damaged: ", "cannot read the manifest: it is of version ")
    assert all(message.startswith(clear) for message in messages)
    assert peak < 50 << 20


def test_bombs_do_not_take_memory():
    """Lengths that promise gigabytes, and deep nesting."""
    tracemalloc.start()
    for data in (
        b"\xdd\xff\xff\xff\xff",  # a list of 2^32 items
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 200_000,
        b"\x81\xa1a" * 200_000,
    ):
        with pytest.raises(IntegrityError):
            decode_manifest(data, "it")
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "..", "a/../../b", "a//b", "a/", "./a", "a\0b", "../x"]
)
def test_names_that_lead_elsewhere(name):
    with pytest.raises(IntegrityError, match="leads out"):
        check_stream_name(name)
    with pytest.raises(IntegrityError):
        target_path(Path("/safe"), name)


def test_links_on_the_way_are_refused(tmp_path):
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(IntegrityError, match="symbolic link"):
        target_path(tmp_path, "link/passwd")
    assert target_path(tmp_path, "a/b") == tmp_path / "a" / "b"


def test_unknown_version_is_refused_by_name():
    document = msgpack.unpackb(sample().encode())
    document["version"] = 7
    with pytest.raises(SnapshotUnfitError, match=r"version 7.*version 1.*upgrade torchmig"):
        decode_manifest(msgpack.packb(document), "it")


def test_the_name_covers_the_bytes():
    data = sample().encode()
    name = snapshot_name(hash_of(data).hex())
    assert load_manifest(name, data).id == hash_of(data).hex()
    with pytest.raises(IntegrityError, match="do not match"):
        load_manifest(name, data[:-1])


@pytest.mark.parametrize(
    "bad",
    [{"x": object()}, {"x": {1: 2}}, {"x": 2**70}, {"x": {(1, 2): 3}}],
)
def test_what_cannot_be_recorded_is_refused_at_commit(bad):
    with pytest.raises(TorchmigError, match="cannot record the snapshot"):
        replace(sample(), launch=bad).encode()


def test_file_names_that_are_no_utf8_survive():
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")
    manifest = replace(sample(), launch={"argv": [odd]})
    assert decode_manifest(manifest.encode(), "x").launch["argv"] == [odd]
