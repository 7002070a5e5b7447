"""Jobs that save into a folder of their node first: suspended with and without the server."""

import json
import secrets
import shutil
import signal

import pytest
from fault_proxy import FaultProxy
from running import JOBS, Run, by_rank, torchmig, unbroken
from test_nodes import end, start

pytest_plugins = ["store_fixtures"]
pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]


@pytest.fixture
def server(s3_servers, monkeypatch):
    """A proxy in front of a server; the job's AWS_* variables point at it."""
    running = s3_servers("rclone")
    with FaultProxy(running.endpoint_url) as proxy:
        for variable, value in running.environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        yield proxy


def ids(address):
    return [
        each["id"] for each in json.loads(torchmig("snapshots", "--json", "--repo", address).stdout)
    ]


def test_suspended_into_the_folder_and_uploaded_when_the_server_is_there(tmp_path, server):
    address, folder = f"s3://bucket-{secrets.token_hex(6)}/jobs", tmp_path / "cache"
    torchmig("init", "--repo", address)
    options = ("--repo", address, "--local-cache", folder)
    job = ("--nproc-per-node=2", JOBS / "plain.py", "120", "0.02")
    first = Run(tmp_path, *options, "--grace=60s", *job)
    first.wait_for_step(5).suspend()
    assert "t_uploaded" in first.errors
    assert ids(address) == ids(folder)

    second = Run(tmp_path, *options, "--grace=5s", "--restore=latest")
    second.wait_for(r"^rank 1 step ")
    server.unavailable = 1 << 30
    # What is left of the grace period ends the wait for the server.
    second.signal(signal.SIGUSR2)
    assert second.wait() == 85, second.errors
    assert "on this job's nodes only" in second.errors
    assert len(ids(folder)) == 2

    third = Run(tmp_path, *options, "--restore=latest").finish()  # still without the server
    assert by_rank(first.text, second.text, third.text) == unbroken(2, "plain.py", "120")
    server.unavailable = 0
    assert ids(address) == ids(folder)[:1]
    torchmig("copy", "--repo", folder, "--to", address)
    assert ids(address) == ids(folder)
    assert torchmig("check", "--read-data", "--repo", address).returncode == 0


def test_two_agents_upload_one_snapshot(tmp_path, server):
    address, folder = f"s3://bucket-{secrets.token_hex(6)}/jobs", tmp_path / "cache"
    torchmig("init", "--repo", address)
    options = ("--repo", address, "--local-cache", folder, "--nproc-per-node=1")
    first = start(tmp_path, "static", *options, JOBS / "plain.py", "120", "0.02")
    first[0].wait_for_step(5)
    first[1].signal(signal.SIGUSR2)
    end(first, 85)
    assert "t_uploaded" in first[0].errors
    assert len(ids(address)) == 1
    shutil.rmtree(folder)  # as on nodes that have never seen the job
    second = start(tmp_path, "static", *options[:-1], "--restore=latest")
    end(second, 0)
    texts = [run.text for run in (*first, *second)]
    assert by_rank(*texts) == unbroken(2, "plain.py", "120")
