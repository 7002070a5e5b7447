"""The format as docs/repository-format.md has it, read by code that shares nothing with torchmig's.

If this reader stops working, the format has changed: that needs a new version, not a new test.
"""

import json
import random
import re
import struct
from pathlib import Path

import msgpack
import zstandard
from blake3 import blake3

from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo.locks import Lock, LockKind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "repository-format.md"
KINDS = ["host-pages", "criu-image", "file", "gpu-block", "tree"]


def read_blobs(root):
    """Every blob of a repository, found through the packs alone."""
    blobs = {}
    for path in (root / "data").rglob("*"):
        if path.is_dir():
            continue
        pack = path.read_bytes()
        length, magic = struct.unpack("<I8s", pack[-12:])
        assert magic == b"TMIGPK01"
        header = pack[-12 - length : -12]
        assert path.name == blake3(header).hexdigest()
        assert path.parent.name == path.name[:2]
        offset = 0
        for blob_id, kind, codec, size, stored in struct.iter_unpack("<32sBBII", header):
            data = pack[offset : offset + stored]
            offset += stored
            if codec:
                assert data[:16] == blake3(data[16:]).digest()[:16]
                data = zstandard.ZstdDecompressor().decompress(data[16:])
            if codec > 1:
                width = {2: 2, 3: 4}[codec]
                planes = [data[at : at + size // width] for at in range(0, size, size // width)]
                data = bytes(byte for number in zip(*planes, strict=True) for byte in number)
            assert len(data) == size
            assert blake3(data).digest() == blob_id
            blobs[blob_id] = (KINDS[kind], data)
        assert offset + length + 12 == len(pack)
    return blobs


def read_stream(stream, blobs):
    extents = list(stream.get("extents", []))
    for tree in stream.get("trees", []):
        kind, data = blobs[tree]
        assert kind == "tree"
        (count,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count}Q", data, 4)
        sizes = struct.unpack_from(f"<{count}I", data, 4 + 8 * count)
        ids = data[4 + 12 * count :]
        extents += [(offsets[n], sizes[n], ids[32 * n : 32 * n + 32]) for n in range(count)]
    assert len(extents) == stream["extent_count"]
    content = bytearray(stream["size_bytes"])
    for offset, size, blob_id in extents:
        assert len(blobs[blob_id][1]) == size
        content[offset : offset + size] = blobs[blob_id][1]
    return bytes(content)


def test_another_program_can_read_a_repository(tmp_path):
    rng = random.Random(6)
    contents = {
        "host-pages": rng.randbytes(3 << 20) + bytes(1 << 20) + b"page " * 200_000,
        "criu-image": b"image " * 1000,
        "file": b"",
        "gpu-block": rng.randbytes(9 << 20)
        + b"\x3c".join([rng.randbytes(1) for _ in range(10**6)]),
    }
    repo = Repository.open(str(tmp_path), create=True)
    with repo.writer() as writer:
        streams = []
        for kind, content in contents.items():
            stream = writer.stream(f"a/{kind}", kind, 0o640)
            stream.write(0, content)
            streams.append(stream.close(len(content)))
    snapshot_id = repo.commit(
        Manifest(JobName("job"), "suspend", ranks=[RankSection(0, "n", 7, streams, {"x": b"y"})])
    )

    config = json.loads((tmp_path / "config").read_text())
    assert (config["format"], config["version"], config["hash"]) == (
        "torchmig-repository", 1, "blake3",
    )  # fmt: skip
    blobs = read_blobs(tmp_path)
    (index,) = (tmp_path / "index").iterdir()
    assert index.name == blake3(index.read_bytes()).hexdigest()
    document = msgpack.unpackb(index.read_bytes())
    assert document["version"] == 1
    named = [h[at : at + 32] for _, h in document["packs"] for at in range(0, len(h), 42)]
    assert set(named) == set(blobs)

    data = (tmp_path / "snapshots" / snapshot_id).read_bytes()
    assert blake3(data).hexdigest() == snapshot_id
    manifest = msgpack.unpackb(data)
    assert list(manifest) == sorted(manifest)
    assert manifest["version"] == 1
    (rank,) = manifest["ranks"]
    for stream in rank["streams"]:
        assert read_stream(stream, blobs) == contents[stream["kind"]]
        chunk = config["chunk_bytes"][stream["kind"]]
        for offset, size, _ in stream.get("extents", []):
            assert offset % chunk + size <= chunk


def test_the_page_shows_the_config_as_it_is(tmp_path):
    Repository.open(str(tmp_path), create=True)
    shown = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert (tmp_path / "config").read_text() == shown


def test_a_lock_is_two_lines(tmp_path):
    repo = Repository.open(str(tmp_path), create=True)
    lock = Lock.acquire(repo.store, LockKind.EXCLUSIVE, "look")
    digest, body, end = (tmp_path / lock.name).read_text().split("\n")
    assert end == ""
    assert blake3(body.encode()).hexdigest() == digest
    document = json.loads(body)
    assert document["kind"] == "exclusive"
    assert set(document) == {"created", "kind", "owner", "purpose", "version"}
    assert set(document["owner"]) == {"host", "boot", "pid_namespace", "pid", "started"}
