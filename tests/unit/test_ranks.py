"""The end of a rank: one that has just come, and one that the kernel does not let come."""

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchmig.agent import rankinit, ranks
from torchmig.agent.ranks import RankProcess
from torchmig.together import together

pytestmark = pytest.mark.criu

FUSE = Path("/dev/fuse")
LOOKUP, INIT = 1, 26
libc = ctypes.CDLL(None, use_errno=True)


class SilentFileSystem:
    """A file system that takes questions and never answers: whoever asks cannot even be killed."""

    def __init__(self, folder):
        self.folder = folder
        self.fd = os.open(FUSE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0"
        assert libc.mount(b"silent", os.fsencode(folder), b"fuse", 0, options.encode()) == 0
        unique, read_ahead = self.next_question(INIT)
        answer = struct.pack("=IIIIHHIIHHI7I", 7, 31, read_ahead, 0, 0, 0, 4096, 1, *[0] * 10)
        os.write(self.fd, struct.pack("=IiQ", 16 + len(answer), 0, unique) + answer)

    def next_question(self, wanted):
        """Wait for a question of that kind; return its number, and the third word of its body."""
        while True:
            question = os.read(self.fd, 1 << 20)
            _size, kind, unique = struct.unpack_from("=IIQ", question)
            if kind == wanted:
                return unique, struct.unpack_from("=I", question.ljust(52), 48)[0]

    def close(self):
        """Let everybody go who waits."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def test_ranks_have_pids_that_are_high_and_not_those_of_other_ranks(tmp_path):
    chosen = [rankinit.choose_pid() for _ in range(100)]
    assert min(chosen) >= 10000
    assert max(chosen) < 20000  # hosts with few pids have 32768
    assert len(set(chosen)) > 90
    process = started(tmp_path, "sh", "-c", "echo $$")
    assert process.inner_pid >= 10000
    while process.poll() is None:
        time.sleep(0.01)
    assert (tmp_path / "out").read_text() == f"{process.inner_pid}\n"
    process.kill()


@pytest.fixture
def silent(tmp_path):
    if not FUSE.exists():
        pytest.skip(f"no '{FUSE}'")
    folder = tmp_path / "silent"
    folder.mkdir()
    file_system = SilentFileSystem(folder)
    yield file_system
    file_system.close()
    subprocess.run(["umount", "--lazy", folder], check=True)


def started(folder, *words):
    process = RankProcess()
    process.spawn(words, dict(os.environ), str(folder), folder / "out", folder / "err")
    return process


def test_a_rank_may_end_at_the_moment_when_it_is_killed(tmp_path):
    process = started(tmp_path, "sleep", "1000")
    os.kill(process.init_pid, signal.SIGKILL)
    while Path(f"/proc/{process.init_pid}").exists():
        pass  # what was its parent takes milliseconds to end after it
    process.kill()
    assert process.returncode == -9


def test_a_rank_may_end_at_the_moment_when_it_is_sent_a_signal(tmp_path):
    process = started(tmp_path, "sleep", "1000")
    os.kill(process.pid, signal.SIGKILL)
    while Path(f"/proc/{process.pid}").exists():
        pass
    process.signal_group(signal.SIGTERM)
    assert process.wait(30) == -9
    process.kill()


@pytest.fixture
def hasty_threads():
    """Let Python change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_that_ask_at_once_hear_the_same(tmp_path):
    """As the launcher's monitor and a request do; without a lock every tenth round fails."""
    for _round in range(10):
        process = started(tmp_path, "sh", "-c", "exit 7")

        def ask(_number, process=process):
            while (code := process.poll()) is None:
                pass
            return code

        assert together(ask, range(6)) == [7] * 6
        process.kill()


@pytest.mark.parametrize("who", ["the agent", "its own init"])
def test_a_rank_that_does_not_end_is_left_and_named(tmp_path, silent, monkeypatch, caplog, who):
    monkeypatch.setattr(ranks, "END_TIMEOUT_SECONDS", 0.5)
    process = started(tmp_path, "cat", str(silent.folder / "file"))
    silent.next_question(LOOKUP)
    if who == "the agent":
        process.kill()
    else:
        os.kill(process.init_pid, signal.SIGKILL)
        assert process.wait(timeout=30) == -9
    assert process.returncode == -9
    assert f"process {process.pid} of a rank has not ended 0.5 s after it was killed" in caplog.text
    assert Path(f"/proc/{process.pid}").exists()
    process.kill()

    silent.close()
    deadline = time.monotonic() + 30
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
