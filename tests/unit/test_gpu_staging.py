"""Staging: touched in advance, handed over a unix socket, given back."""

import mmap
import os
import socket

import pytest

from torchmig.capture.device import staging as staging_module
from torchmig.capture.device.staging import HUGE_PAGE_BYTES, Staging
from torchmig.errors import TorchmigError


def memory_of(fd):
    return os.fstat(fd).st_blocks * 512


def test_touching_finds_memory_as_far_as_asked_for():
    with Staging(200 << 20) as staging:
        assert memory_of(staging.fd) == 0
        staging.touch(100 << 20)
        staging.wait_touched()
        assert 100 << 20 <= memory_of(staging.fd) <= 200 << 20
        assert staging.huge_bytes <= staging.touched_bytes
        staging.touch(1 << 40)
        staging.wait_touched()
        assert memory_of(staging.fd) == staging.size_bytes == staging.touched_bytes


def test_touching_changes_no_byte():
    with Staging(4 << 20) as staging:
        with staging.view() as view:
            view[:4] = b"kept"
        staging.touch(staging.size_bytes)
        staging.wait_touched()
        with staging.view() as view:
            assert bytes(view[:4]) == b"kept"


def test_sizes_are_whole_huge_pages():
    with Staging(1) as staging:
        assert staging.size_bytes == HUGE_PAGE_BYTES


def test_another_process_gets_the_descriptor(tmp_path):
    path = tmp_path / "staging.sock"
    with Staging(HUGE_PAGE_BYTES) as staging, staging.offered(path) as offered:
        child = os.fork()
        if child == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(offered)
                _, fds, _, _ = socket.recv_fds(connection, 16, 1)
            with mmap.mmap(fds[0], HUGE_PAGE_BYTES) as mapped:
                mapped[:5] = b"child"
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with staging.view() as view:
            assert bytes(view[:5]) == b"child"
    assert not path.exists()


def test_a_folder_that_is_missing_is_named(tmp_path):
    path = tmp_path / "none" / "staging"
    with (
        Staging(1 << 20) as staging,
        pytest.raises(TorchmigError, match=f"at '{path}': No such file"),
        staging.offered(path),
    ):
        pass


def test_closing_twice_is_closing_once():
    staging = Staging(HUGE_PAGE_BYTES)
    staging.touch(HUGE_PAGE_BYTES)
    staging.close()
    staging.close()


def test_the_default_is_a_share_of_what_is_available(monkeypatch):
    monkeypatch.setattr(staging_module, "available_bytes", lambda: 100 << 30)
    assert staging_module.default_size(ranks=2, gpu_bytes=141 << 30) == pytest.approx(20 << 30)
    assert staging_module.default_size(ranks=1, gpu_bytes=16 << 30) == 16 << 30
    assert staging_module.available_bytes() == 100 << 30


def test_available_memory_is_known_here():
    assert 0 < staging_module.available_bytes() < 1 << 50
