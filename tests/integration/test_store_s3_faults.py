"""What real servers and networks do wrong is tried again or said in one sentence."""

import secrets
import shutil
import socket
import subprocess

import pytest
from fault_proxy import FaultProxy
from s3_servers import SECRET_KEY, find_program, free_ports, start_rclone

from torchmig.errors import (
    ObjectMissingError,
    RepositoryNotFoundError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from torchmig.repo import JobName, Manifest, Repository
from torchmig.store import RetryingStore, RetryPolicy, open_store
from torchmig.store.s3 import S3Options, S3Store

pytest_plugins = ["store_fixtures"]
QUICK = RetryPolicy(deadline_seconds=20, first_wait_seconds=0.01, longest_wait_seconds=0.1)
IMPATIENT = RetryPolicy(deadline_seconds=0.2, first_wait_seconds=0.01)


@pytest.fixture(params=["seaweedfs", "rclone"])
def server(request, s3_servers, monkeypatch):
    running = s3_servers(request.param)
    for variable, value in running.environment.items():
        monkeypatch.setenv(variable, value)
    return running


@pytest.fixture
def proxy(server):
    with FaultProxy(server.endpoint_url) as running:
        yield running


def make_store(endpoint_url, policy=QUICK, bucket=None, **options):
    inner = S3Store(
        bucket or f"bucket-{secrets.token_hex(6)}",
        "prefix",
        S3Options(endpoint_url=endpoint_url, **options),
    )
    return RetryingStore(inner, policy)


@pytest.fixture
def store(proxy):
    made = make_store(proxy.endpoint_url)
    made.create()
    yield made
    made.close()


def test_503_for_a_while(store, proxy):
    store.put("data/aa/x", [b"before"])
    store.close()  # so that new connections are made
    fresh = make_store(proxy.endpoint_url, bucket=store.inner.bucket)
    proxy.unavailable = 4
    assert fresh.get("data/aa/x") == b"before"
    assert proxy.unavailable == 0
    fresh.close()


def test_503_for_too_long_is_an_error_that_says_so(store, proxy):
    fresh = make_store(proxy.endpoint_url, IMPATIENT, bucket=store.inner.bucket)
    proxy.unavailable = 1000
    with pytest.raises(StoreError, match="busy; gave up after") as caught:
        fresh.put("data/aa/x", [b"x"])
    assert not isinstance(caught.value, TransientStoreError)
    proxy.unavailable = 0
    with pytest.raises(ObjectMissingError):
        store.get("data/aa/x")
    fresh.close()


def test_reset_in_the_middle_of_a_put_and_a_get(store, proxy):
    content = secrets.token_bytes(4_000_000)
    proxy.break_up = 3
    store.put("data/aa/x", [content])
    assert proxy.break_up == 0
    proxy.break_down = 3
    assert store.get("data/aa/x") == content
    assert proxy.break_down == 0
    assert store.get("data/aa/x", 17, 1_000_000) == content[17:1_000_017]


def test_a_broken_put_leaves_nothing(store, proxy):
    impatient = make_store(proxy.endpoint_url, IMPATIENT, bucket=store.inner.bucket)
    proxy.break_up = 1000
    with pytest.raises(StoreError, match=r"connection broke.*gave up"):
        impatient.put("data/aa/x", [secrets.token_bytes(4_000_000)])
    proxy.break_up = 0
    assert list(store.list("")) == []
    impatient.close()


def test_a_server_that_does_not_answer(store, proxy):
    slow = make_store(
        proxy.endpoint_url, IMPATIENT, bucket=store.inner.bucket, read_timeout_seconds=0.3
    )
    proxy.stalled.set()
    with pytest.raises(StoreError, match="did not answer in time"):
        slow.get("data/aa/x")
    proxy.stalled.clear()
    slow.close()


def test_a_server_that_is_not_there(server):
    (port,) = free_ports(1)
    gone = make_store(f"http://127.0.0.1:{port}", IMPATIENT)
    with pytest.raises(StoreError, match="cannot be reached"):
        gone.exists()
    nowhere = make_store("http://nowhere.invalid", IMPATIENT)
    with pytest.raises(StoreError, match=r"cannot be reached|connection broke"):
        nowhere.exists()


def test_a_server_that_comes_back(server):
    """Nothing listens at first; the retries find the server once it is there."""
    (port,) = free_ports(1)
    bucket = f"bucket-{secrets.token_hex(6)}"
    make_store(server.endpoint_url, bucket=bucket).create()
    tries = []

    def wait(seconds):
        tries.append(seconds)
        if len(tries) == 3:
            proxies.append(FaultProxy(server.endpoint_url, port))

    proxies = []
    inner = S3Store(bucket, "prefix", S3Options(endpoint_url=f"http://127.0.0.1:{port}"))
    late = RetryingStore(inner, QUICK, wait=wait)
    late.put("data/aa/x", [b"x"])
    assert len(tries) == 3
    assert late.get("data/aa/x") == b"x"
    late.close()
    with proxies[0]:
        pass


def test_wrong_keys_are_not_tried_again(store, server, monkeypatch):
    waits = []
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    wrong = RetryingStore(
        S3Store(store.inner.bucket, "prefix", S3Options(endpoint_url=server.endpoint_url)),
        wait=waits.append,
    )
    with pytest.raises(StoreError) as caught:
        wrong.put("data/aa/x", [b"x"])
    assert waits == []
    assert "wrong-secret" not in str(caught.value)
    assert SECRET_KEY not in str(caught.value)


def test_no_bucket(server):
    nowhere = make_store(server.endpoint_url)
    assert not nowhere.exists()
    if server.name != "seaweedfs":  # which makes a bucket with its first object
        with pytest.raises(StoreError):
            nowhere.put("data/aa/x", [b"x"])
    address = f"s3://bucket-{secrets.token_hex(6)}/p"
    with pytest.raises(RepositoryNotFoundError, match="torchmig init"):
        Repository.open(address)
    assert not open_store(address).exists()  # nobody but init makes a bucket
    with pytest.raises(RepositoryNotFoundError, match="torchmig init"):
        Repository.open(address, create=True)
    assert not open_store(address).exists()
    Repository.open(address, create=True, make_bucket=True)
    Repository.open(address)
    Repository.open(f"{address}/another", create=True)  # the bucket is there now


def test_a_snapshot_through_faults(store, proxy):
    """An upload through resets and 503s is complete or does not exist."""
    repo = Repository.on_store(store, create=True)
    content = secrets.token_bytes(20_000_000)
    proxy.break_up, proxy.break_down, proxy.unavailable = 3, 1, 2
    with repo.writer() as writer:
        stream = writer.stream("s", "file")
        stream.write(0, content)
        done = stream.close()
    repo.commit(Manifest(job=JobName("j"), kind="suspend"))
    proxy.break_down = 2
    fresh = Repository.on_store(store)
    assert len(fresh.snapshots()) == 1
    with fresh.reader() as reader:
        assert reader.read(done) == content


def test_credentials_from_files(server, monkeypatch, tmp_path):
    keys = server.environment
    for variable in keys:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        S3Store("b", "p", S3Options(endpoint_url=server.endpoint_url)).exists()
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = {keys['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        f"[default]\nendpoint_url = {server.endpoint_url}\nregion = us-east-1\n"
    )
    assert not open_store(f"s3://bucket-{secrets.token_hex(6)}/p").exists()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("s3://key:secret@bucket/p", "credentials"),
        ("s3:///p", "s3://bucket/prefix"),
        ("s3://host:9000/p", "AWS_ENDPOINT_URL"),
        ("s3://bucket/p?endpoint=x", "no '\\?'"),
        ("ftp://x/y", "no kind of repository"),
        ("", "empty"),
        ("file://host/x", "file:///"),
    ],
)
def test_bad_addresses(address, why):
    with pytest.raises(UsageError, match=why) as caught:
        open_store(address)
    assert "secret" not in str(caught.value).lower().replace("aws_secret_access_key", "")


def test_bad_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hidden@127.0.0.1:1")
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL") as caught:
        open_store("s3://bucket/p").exists()
    assert "hidden" not in str(caught.value)


def test_tls_with_a_certificate_of_ones_own(tmp_path, monkeypatch):
    for program in ("openssl", "rclone"):
        if shutil.which(program) is None and find_program(program) is None:
            pytest.skip(f"needs {program!r}")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    server = start_rclone(tmp_path / "server", certificate=(certificate, key))
    try:
        assert server.endpoint_url.startswith("https://")
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        address = f"s3://bucket-{secrets.token_hex(6)}/p"
        with pytest.raises(StoreError, match=r"certificate is not accepted.*AWS_CA_BUNDLE"):
            open_store(address).exists()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nothing"))
        with pytest.raises(UsageError, match="no such file"):
            open_store(address).exists()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        store = open_store(address)
        store.create()
        store.put("data/aa/x", [b"over TLS"])
        assert store.get("data/aa/x") == b"over TLS"
        store.close()
    finally:
        server.stop()


def test_the_proxy_itself_is_honest(server):
    with FaultProxy(server.endpoint_url) as proxy:
        host, port = proxy.endpoint_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(4) == b"HTTP"
