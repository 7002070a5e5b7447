"""The stores that contract tests run over, each as a fixture parameter."""

import os
import secrets
from pathlib import Path

import pytest
from s3_servers import Server, find_program, start_rclone, start_seaweedfs

from torchmig.store import open_store

_STARTERS = {"seaweedfs": ("weed", start_seaweedfs), "rclone": ("rclone", start_rclone)}
KINDS = ["folder", "seaweedfs", "rclone", "external"]
_EXTERNAL = os.environ.get("TORCHMIG_TEST_S3_URL")  # read before tests hide the variables
_running: dict[str, Server] = {}


@pytest.fixture(scope="session")
def s3_servers(tmp_path_factory):
    """Return a function from a server's name to the server, started once a session."""

    def start(name):
        program, starter = _STARTERS[name]
        if find_program(program) is None:
            pytest.skip(f"needs {program!r} (pip install {name}-bin)")
        if name not in _running:
            _running[name] = starter(tmp_path_factory.mktemp(name))
        return _running[name]

    yield start
    while _running:
        _running.popitem()[1].stop()


@pytest.fixture(params=KINDS)
def store_address(request, tmp_path, s3_servers, monkeypatch):
    """An address at which nothing is yet, on every kind of store."""
    return address_on(request.param, tmp_path, s3_servers, monkeypatch)


@pytest.fixture
def store(store_address):
    """An empty store of every kind, ready for use."""
    opened = open_store(store_address)
    opened.create()
    yield opened
    opened.close()


def address_on(kind: str, tmp_path: Path, s3_servers, monkeypatch) -> str:
    if kind == "folder":
        return str(tmp_path / "store")
    if kind == "external":
        address = _EXTERNAL
        if not address:
            pytest.skip("needs TORCHMIG_TEST_S3_URL=s3://bucket/prefix (and AWS_* variables)")
        return f"{address.rstrip('/')}/{secrets.token_hex(8)}"
    for variable, value in s3_servers(kind).environment.items():
        monkeypatch.setenv(variable, value)
    return f"s3://bucket-{secrets.token_hex(6)}/some/prefix"
