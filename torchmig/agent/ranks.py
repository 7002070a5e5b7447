"""Rank processes of a node: each under a rank-init in a PID namespace of its own."""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmig.agent import claims, rankinit
from torchmig.agent.claims import Claim
from torchmig.errors import HostUnfitError, RepositoryLockedError, TorchmigError

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 30.0
END_TIMEOUT_SECONDS = 30.0


def sweep(runtime_dir: Path) -> None:
    """Remove what agents that were killed have left: their ranks are gone with them."""
    for lock in runtime_dir.glob("*/rank-*/lock"):
        RankFolder(lock.parent).remove()
    for path in runtime_dir.glob("*/agent-*.sock"):
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass  # removed meanwhile, or not ours to use
    for folder in runtime_dir.glob("*"):
        with contextlib.suppress(OSError):  # not empty: the job is running
            folder.rmdir()


@dataclass(frozen=True)
class RankFolder:
    """Where a rank has its socket and, unless torchrun redirects them, its standard streams.

    The path is the same after a restore: it is in the images.
    """

    path: Path

    @property
    def control(self) -> Path:
        """Path of the control socket."""
        return self.path / "ctl"

    @property
    def stdout(self) -> Path:
        """File of the rank's standard output."""
        return self.path / "stdout"

    @property
    def stderr(self) -> Path:
        """File of the rank's standard error."""
        return self.path / "stderr"

    def claim(self) -> Claim:
        """Make the folder and lock it.

        Raises:
            RepositoryLockedError: A running job has it.
        """
        while True:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                taken = claims.claim(self.path)
            except FileNotFoundError:
                continue  # removed at this moment by an agent that has ended
            if taken is None:
                raise RepositoryLockedError(
                    f"cannot start rank in '{self.path}': a job of this name runs here already; "
                    "end or suspend it first, or start this one under another '--job'"
                )
            return taken

    def remove(self) -> None:
        """Remove the folder, unless an agent has it; the one of a restored job, for example."""
        claims.remove_unclaimed(self.path)


class RankProcess:
    """One rank, as a subprocess.Popen would show it: pid, poll, wait.

    `pid` is the rank's pid in the agent's namespace, `inner_pid` that in its own.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = ours
        self._buffer = b""
        self._lock = threading.Lock()  # the monitor and a request may ask at the same moment
        self.returncode: int | None = None
        self.pid = 0
        self.inner_pid = 0
        self.argv: list[str] = []
        with theirs:
            self._outer = subprocess.Popen(
                [sys.executable, "-I", "-S", rankinit.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        try:
            answer = self._read(START_TIMEOUT_SECONDS)
            if "failed" in answer:
                raise HostUnfitError(
                    f"cannot make namespaces for a rank: {answer['failed']}; run as root, in a "
                    "container with '--privileged', or see 'torchmig doctor'"
                )
            self.init_pid = self._children(self._outer.pid)[0]
        except BaseException:
            self.kill()
            raise

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdout: str | Path,
        stderr: str | Path,
    ) -> None:
        """Start the rank."""
        self._send(
            do="spawn",
            argv=list(argv),
            env=dict(env),
            cwd=cwd,
            stdout=str(stdout),
            stderr=str(stderr),
        )
        self.argv = list(argv)
        self._started()

    def adopt(self, inner_pid: int) -> None:
        """Take a process that CRIU has restored in this namespace as the rank."""
        self._send(do="adopt", pid=inner_pid)
        self._started()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the rank runs."""
        with self._lock:
            if self.returncode is None:
                self._receive(0)
                self._take_status()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end as subprocess.Popen does.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.argv, timeout or 0)
            with self._lock:
                self._receive(min(left, 1.0))
        assert self.returncode is not None
        return self.returncode

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process group."""
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, number)

    @property
    def stopped(self) -> bool:
        """Whether the rank is stopped, as one is that has been dumped."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False  # it ended meanwhile
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        """End the whole namespace, at once; may be called twice.

        What the kernel does not let end is left, and said.
        """
        if getattr(self, "init_pid", 0) and self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.init_pid, signal.SIGKILL)
        elif self._outer.poll() is None:
            self._outer.kill()
        with self._lock:
            self._channel.close()
            self._wait_for_init()
            if self.returncode is None:
                self.returncode = -signal.SIGKILL

    def _wait_for_init(self) -> None:
        """Wait until the namespace has ended, but not for ever."""
        try:
            self._outer.wait(END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            pid = self.pid or self._outer.pid
            log.error(
                "process %d of a rank has not ended %g s after it was killed, and is left: it, or "
                "one that it has started, waits in the kernel for a driver or a file system, say; "
                "see '/proc/%d/stack'",
                pid,
                END_TIMEOUT_SECONDS,
                pid,
            )
            self._outer.kill()  # it is there to wait for the namespace, which nobody does any more
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._outer.wait(1.0)

    def tree(self) -> list[int]:
        """Return the pids, here, of the rank and its descendants."""
        found = [self.pid]
        for pid in found:
            found.extend(self._children(pid))
        return found

    def _started(self) -> None:
        answer = self._read(START_TIMEOUT_SECONDS)
        self.inner_pid = answer["pid"]
        for pid in self._children(self.init_pid):
            if _inner_pid(pid) == self.inner_pid:
                self.pid = pid
                return
        # It has ended already; its status is on the way. The number is for messages only.
        self.pid = self.pid or self._outer.pid

    def _send(self, **message: Any) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise TorchmigError(f"cannot reach the init of a rank: {error}") from error

    def _read(self, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._receive(left):
                raise HostUnfitError("cannot start a rank: its init did not answer")
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _receive(self, timeout_seconds: float) -> bool:
        """Take in what there is; False when the init is gone."""
        if self._channel.fileno() < 0:
            return False
        ready, _, _ = select.select([self._channel], [], [], timeout_seconds)
        if not ready:
            return True
        try:
            chunk = self._channel.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            self._channel.close()
            self._wait_for_init()
            return False
        self._buffer += chunk
        return True

    def _take_status(self) -> None:
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            message = json.loads(line)
            if "status" in message:
                self.returncode = os.waitstatus_to_exitcode(message["status"])
                self._wait_for_init()
        if self.returncode is None and self._channel.fileno() < 0:
            self.returncode = -signal.SIGKILL  # somebody killed pid 1, and so the namespace

    @staticmethod
    def _children(pid: int) -> list[int]:
        found: list[int] = []
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                found.extend(map(int, (thread / "children").read_text().split()))
        except OSError:
            pass  # it ended meanwhile
        return found


def _inner_pid(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])
