"""Rank-init: pid 1 of a rank's own PID namespace.

Run as a program, without site packages, by the agent:

    python -I -S rankinit.py FD

It moves into new PID and mount namespaces, forks, and its child, pid 1 there, starts the rank (or
waits for CRIU to restore one) and lives as long as the rank does. FD is a stream socket to the
agent; both sides send one JSON object a line. When the socket closes, the agent is gone, and pid 1
ends and takes the whole namespace with it: no orphan is left, whatever dies first.

From the agent:
    {"do": "spawn", "argv": […], "env": {…}, "cwd": …, "stdout": path, "stderr": path}
    {"do": "adopt", "pid": N}      a restored rank, which is now a child of pid 1
To the agent:
    {"up": true} | {"failed": text} | {"pid": N} | {"status": wait status of the rank}
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Collection
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
MS_REC = 0x4000
MS_SLAVE = 1 << 19
MS_NOSUID_NODEV_NOEXEC = 0x2 | 0x4 | 0x8

# They go to the agent, which decides what its ranks hear of them.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# When it restores, CRIU takes the first free pids of the namespace for itself: ranks start high.
# They end below 32768, where they begin anew on many hosts, with room for what a rank forks.
LOWEST_PID, HIGHEST_PID = 10000, 19999
LAST_PID_FILE = "/proc/sys/kernel/ns_last_pid"

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a libc call has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_namespaces() -> int:
    """Move into new namespaces; return 0 in pid 1 and its pid in the parent."""
    check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
    # Mounts made on the host later still arrive here; none made here goes out.
    check(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "mount / slave")
    child = os.fork()
    if child == 0:
        check(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None), "mount /proc")
        os.close(os.open(LAST_PID_FILE, os.O_WRONLY))  # some containers have it read-only
    return child


def choose_pid() -> int:
    """Return the pid that the rank is to have, most likely one that no other rank has.

    CUDA gives an abstract socket the name of the process's pid and of its namespace's inode, and
    fails to start where that name is taken. A restored process has brought its name along, while
    the kernel gives the inodes of namespaces that have ended to new ones: there ranks with equal
    pids would meet.
    """
    number = int.from_bytes(os.urandom(8), "little")
    return LOWEST_PID + number % (HIGHEST_PID - LOWEST_PID + 1)


def spawn(order: dict[str, Any], ignored: Collection[int]) -> int:
    """Start the rank as a session leader with its standard streams in files; return its pid.

    The files are opened here, in the mount namespace that the rank and CRIU share. Signals that the
    agent was started to ignore, as by nohup, are for the rank to ignore as well.
    """
    last_pid = os.open(LAST_PID_FILE, os.O_WRONLY)
    os.write(last_pid, str(choose_pid() - 1).encode())
    os.close(last_pid)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (*TERMINAL_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        null = os.open(os.devnull, os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Others may read what torchrun redirects; the agent's own folder is closed to them.
        out = os.open(order["stdout"], flags, 0o666)
        err = os.open(order["stderr"], flags, 0o666)
        for target, fd in enumerate((null, out, err)):
            os.dup2(fd, target)
        os.closerange(3, max(null, out, err, 64) + 1)
        os.chdir(order["cwd"])
        environment = dict(order["env"], TORCHMIG_RANK_PID=str(os.getpid()))
        os.execvpe(order["argv"][0], order["argv"], environment)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return
        os.write(2, f"torchmig-run: cannot start '{order['argv'][0]}': {error}\n".encode())
    os._exit(127)


class Init:
    """Pid 1: takes orders, reaps whatever becomes its child, reports the end of the rank."""

    def __init__(self, channel: socket.socket, ignored: Collection[int]) -> None:
        self.channel = channel
        self.ignored = ignored
        self.buffer = b""
        self.rank = 0

    def say(self, **message: object) -> None:
        """Send one message; the agent may be gone, and then the loop ends by itself."""
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(1)

    def run(self) -> None:
        """Serve until the agent goes or the rank has ended."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.say(up=True)
        while True:
            ready, _, _ = select.select([self.channel.fileno(), reader], [], [])
            if reader in ready:
                os.read(reader, 4096)
                self.reap()
            if self.channel.fileno() in ready:
                chunk = self.channel.recv(1 << 20)
                if not chunk:
                    os._exit(1)
                self.buffer += chunk
                while b"\n" in self.buffer:
                    line, self.buffer = self.buffer.split(b"\n", 1)
                    self.obey(json.loads(line))

    def obey(self, order: dict[str, Any]) -> None:
        """Do what the agent says."""
        if order["do"] == "spawn":
            self.rank = spawn(order, self.ignored)
            self.say(pid=self.rank)
        elif order["do"] == "adopt":
            self.rank = order["pid"]
            self.say(pid=self.rank)
            self.reap()

    def reap(self) -> None:
        """Collect ended children; when the rank is among them, tell its status and end."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.rank:
                self.say(status=status)
                os._exit(0)


def main() -> None:
    """Run as described at the top."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    ignored = {number for number in TERMINAL_SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        child = enter_namespaces()
    except OSError as error:
        channel.sendall(json.dumps({"failed": str(error)}).encode() + b"\n")
        os._exit(1)
    if child == 0:
        Init(channel, ignored).run()
    channel.close()
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
