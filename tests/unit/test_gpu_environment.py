"""What ranks get in their environment for the sake of their GPUs."""

import os
import subprocess
import sys

import pytest

from torchmig import host
from torchmig.capture.device import environment
from torchmig.gpu_settings import NEEDED, misfits

ONE_NODE = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
ONE_OF_TWO = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def examined(name):
    """Return what the doctor says."""
    checks = host.examine(host.Where(None, None, "/run/torchmig"))
    return next(check for check in checks if check.name == name)


@pytest.fixture
def gpu_host(monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)


@pytest.fixture
def rdma_host(gpu_host, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "RDMA_DEVICES", tmp_path)
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()


def test_a_host_without_driver_adds_nothing(monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    assert environment.rank_environment({}) == {}


@pytest.mark.usefixtures("gpu_host")
def test_the_users_own_values_stay():
    added = environment.rank_environment({"NCCL_NVLS_ENABLE": "1", "LD_PRELOAD": "/lib/own.so"})
    assert "NCCL_NVLS_ENABLE" not in added
    assert added["NCCL_RAS_ENABLE"] == "0"
    library = environment.preload_library()
    assert added["LD_PRELOAD"] == f"{library}:/lib/own.so"


@pytest.mark.usefixtures("gpu_host")
def test_a_rank_of_a_rank_gets_the_library_once():
    added = environment.rank_environment({})
    again = environment.rank_environment(added)
    assert "LD_PRELOAD" not in again


@pytest.mark.usefixtures("gpu_host")
def test_ranks_of_one_node_are_kept_off_other_networks():
    assert environment.rank_environment(ONE_NODE)["NCCL_NET"] == "Socket"
    assert "NCCL_NET" not in environment.rank_environment({**ONE_NODE, "NCCL_NET": "IB"})
    assert "NCCL_NET" not in environment.rank_environment(ONE_OF_TWO)


@pytest.mark.usefixtures("rdma_host")
def test_ranks_of_several_nodes_are_warned_of_networks_that_last():
    assert "use mlx5_0, mlx5_1 " in environment.warn_of(ONE_OF_TWO)
    assert environment.warn_of(ONE_NODE) is None
    for own in ({"NCCL_NET": "socket"}, {"NCCL_IB_DISABLE": "1"}):
        assert environment.warn_of({**ONE_OF_TWO, **own}) is None


@pytest.mark.usefixtures("rdma_host")
def test_the_doctor_names_networks_that_last(monkeypatch):
    monkeypatch.delenv("NCCL_NET", raising=False)
    found = examined("remote memory")
    assert (found.state, found.found) == (host.State.WARNING, "NCCL would use mlx5_0, mlx5_1")
    assert "NCCL_NET=Socket" in found.cure
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert examined("remote memory").state is host.State.OK


def test_settings_that_a_checkpoint_does_not_survive_are_named(monkeypatch):
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
        (found,) = map(str, misfits({name: "1"}))
        assert found.startswith(f"{name}=1: ")
        assert found.endswith(f"; set {name}=0 or leave it unset")
    assert misfits(dict.fromkeys(NEEDED, "0")) == []
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("UV_USE_IO_URING", "1")
    check = examined("gpu settings")
    assert check.state is host.State.WARNING
    assert "UV_USE_IO_URING=1: CRIU cannot dump io_uring" in check.found
    assert "NCCL_CUMEM_ENABLE=0: " in check.found
    assert "leave it unset" in check.cure


def test_the_library_changes_nothing_where_there_is_no_cuda():
    script = (
        "import socket, sys, ctypes\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "c = socket.create_connection(s.getsockname()); peer, _ = s.accept()\n"
        "c.sendall(b'through'); assert peer.recv(7) == b'through'\n"
        "import torch; from torchmig import _C\n"
        "assert _C.arena_why_unusable(), 'an arena without a driver'\n"
        "assert not _C.is_nccl_socket(1)\n"
        "_C.arena_detach(); _C.arena_attach()\n"
        "print(sum(_C.arena_seen().values()), torch.ones(3).sum().item())\n"
    )
    library = environment.preload_library()
    assert library is not None
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_PRELOAD": str(library), "TORCHMIG_NO_ARENA": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 3.0\n", "")


def test_the_library_exports_its_hooks_and_nothing_else():
    library = environment.preload_library()
    assert library is not None
    done = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    sockets = {"socket", "accept", "accept4"}
    assert {name for name in names if not name.startswith("cuda")} == sockets | {
        "cuptiSubscribe",
        "torchmig_arena_abi",
    }
