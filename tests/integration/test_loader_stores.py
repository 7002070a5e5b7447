"""What brings GPU memory for a restore is forked, and so are its connections to a server."""

import random
import secrets

import pytest
from arriving import digests, take

from torchmig.agent.loader import Loader, Request
from torchmig.capture.device.blocks import place, to_state
from torchmig.capture.device.windows import Block
from torchmig.progress import make_progress
from torchmig.repo import Depot, JobName, Kind, Manifest, RankSection, Repository

pytest_plugins = ["store_fixtures"]

MIB = 1 << 20
SIZES = (30 * MIB, 5, 50 * MIB)
QUIET = make_progress(as_json=False, quiet=True)


def save(depot, distant):
    """Store a rank's blocks as agents do; return what the blocks hold."""
    noise = random.Random(1)
    contents = [noise.randbytes(size) for size in SIZES]
    blocks = [Block(0, number << 32, size) for number, size in enumerate(SIZES)]
    with depot.writing() as writer:
        stream = writer.stream("rank-0/gpu/0", Kind.GPU_BLOCK)
        for placed, data in zip(place(blocks), contents, strict=True):
            stream.write(placed.stream_offset, data)
        streams = [stream.close()]
    state = {"gpu": {"facts": {"devices": [{}]}, "blocks": to_state(blocks)}}
    section = RankSection(0, "here", 1, streams, state)
    nodes = [{"node": 0, "host": "here", "ranks": [0]}]
    manifest = Manifest(JobName("job"), "suspend", nodes=nodes, ranks=[section])
    if depot.cache is None:
        with depot.holding() as repository:
            repository.commit(manifest)
        return contents
    depot.keep(manifest)
    if distant:
        with depot.delivering() as cache:
            depot.upload(manifest, [section])
            cache.commit(manifest)
    return contents


def load(depot, staging_bytes):
    """Return the hashes of the blocks that a loader brings."""
    manifest = depot.load("latest")
    loader = Loader(Request(depot.to_dict(), manifest.id, None, None, "here", staging_bytes))
    loaded = loader.loaded(manifest, manifest.ranks, QUIET)[0]
    try:
        return take(loaded.arrivals, loaded.staging, SIZES)
    finally:
        loaded.staging.close()
        loader.close()


@pytest.mark.s3
@pytest.mark.parametrize("server", ["seaweedfs", "rclone"])
@pytest.mark.parametrize("staging_bytes", [None, 64 * MIB])
def test_all_arrives_from_a_server(s3_servers, monkeypatch, server, staging_bytes):
    for variable, value in s3_servers(server).environment.items():
        monkeypatch.setenv(variable, value)
    depot = Depot(f"s3://bucket-{secrets.token_hex(6)}/jobs")
    Repository.open(depot.address, create=True, make_bucket=True).close()
    contents = save(depot, distant=True)
    assert load(depot, staging_bytes) == digests(contents)


@pytest.mark.s3
@pytest.mark.parametrize("at", ["this node", "the server", "both"])
def test_all_arrives_with_a_folder_before_a_server(s3_servers, monkeypatch, tmp_path, at):
    for variable, value in s3_servers("rclone").environment.items():
        monkeypatch.setenv(variable, value)
    address = f"s3://bucket-{secrets.token_hex(6)}/jobs"
    here = Depot(address, str(tmp_path / "here"))
    if at != "this node":
        Repository.open(address, create=True, make_bucket=True).close()
    contents = save(here, distant=at != "this node")
    depot = Depot(address, str(tmp_path / "elsewhere")) if at == "the server" else here
    assert load(depot, None) == digests(contents)
