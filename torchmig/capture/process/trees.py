"""Dumps and restores the process tree of a rank with CRIU, inside the rank's PID namespace."""

import importlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchmig.criu import Criu, load_pycriu
from torchmig.errors import TorchmigError

log = logging.getLogger(__name__)

DUMP_LOG = "dump.log"
RESTORE_LOG = "restore.log"
LOG_LEVEL = 2  # warnings and errors; more costs time on trees with many mappings
GHOST_LIMIT_BYTES = (1 << 32) - 1  # the field has 32 bits
# CRIU's own limit on one dump or restore; it kills the dump, not the job.
TIMEOUT_SECONDS = 3600


class CriuError(TorchmigError):
    """CRIU has refused or failed."""


def dump(
    criu: Criu,
    init_pid: int,
    inner_pid: int,
    folder: Path,
    *,
    leave_stopped: bool,
    close_connections: bool = False,
) -> float:
    """Write the images of a tree into a folder and return the seconds that it took.

    Args:
        criu: The CRIU to use.
        init_pid: Pid, here, of the init of the namespace.
        inner_pid: Pid, there, of the root of the tree.
        folder: Takes the images; must exist and be empty.
        leave_stopped: Leave the tree stopped (SIGCONT lets it go on) and not running.
        close_connections: Dump TCP connections too, which a restore closes; here they stay.

    Raises:
        CriuError: With CRIU's own reason; the tree runs on.
    """
    options = _options(criu, folder, DUMP_LOG)
    options.pid = inner_pid
    options.leave_running = not leave_stopped
    options.leave_stopped = leave_stopped
    options.tcp_close = close_connections
    begun = time.monotonic()
    _run(criu, init_pid, "dump", options, folder / DUMP_LOG)
    return time.monotonic() - begun


def restore(criu: Criu, init_pid: int, folder: Path) -> int:
    """Restore a tree into the namespace of `init_pid` and return its root's pid there.

    Raises:
        CriuError: With CRIU's own reason; nothing is left of the tree.
    """
    options = _options(criu, folder, RESTORE_LOG)
    options.tcp_close = True  # those that have been dumped
    _remove_ghosts(folder)
    answer = _run(criu, init_pid, "restore", options, folder / RESTORE_LOG)
    return int(answer.pid)


def _remove_ghosts(folder: Path) -> None:
    """Remove what an earlier restore of these images has left, if it was killed.

    For the time of a restore CRIU gives files that had lost their names new ones, and insists on
    making them itself.
    """
    codec = importlib.import_module("pycriu.images")

    def entries(name: str) -> list[dict[str, Any]]:
        path = folder / name
        if not path.exists():
            return []
        with path.open("rb") as file:
            return list(codec.load(file)["entries"])

    ghosts = {
        entry["orig_id"]: entry["remap_id"]
        for entry in entries("remap-fpath.img")
        if entry["remap_type"] == "GHOST"
    }
    for entry in entries("files.img") if ghosts else []:
        if entry["id"] in ghosts and "reg" in entry:
            name = f"{entry['reg']['name']}.cr.{ghosts[entry['id']]:x}.ghost"
            Path("/", name).unlink(missing_ok=True)


def _options(criu: Criu, folder: Path, log: str) -> Any:
    load_pycriu(criu)
    rpc = importlib.import_module("pycriu.rpc_pb2")
    options = rpc.criu_opts()
    options.images_dir_fd = -1  # means a descriptor of this process, by its pid, which is not
    # known in CRIU's PID namespace. The folder is given by name instead, and CRIU insists that the
    # name is a link: see _run.
    options.log_file = log
    options.log_level = LOG_LEVEL
    options.link_remap = True  # semaphores in /dev/shm that have been unlinked
    options.ghost_limit = GHOST_LIMIT_BYTES
    options.file_locks = True
    options.manage_cgroups = False
    options.network_lock = rpc.criu_network_lock_method.Value("SKIP")
    options.timeout = TIMEOUT_SECONDS
    return options


def _run(criu: Criu, init_pid: int, verb: str, options: Any, log_path: Path) -> Any:
    pycriu = load_pycriu(criu)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(log_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    options.images_dir = f"/proc/self/fd/{folder}"
    namespaces = ["nsenter", "--target", str(init_pid), "--pid", "--mount"]
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*namespaces, str(criu.path), "swrk", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=verb == "dump",  # of a restore the tree's own are made
            )
        os.close(folder)
        threading.Thread(target=_end_with, args=(process, ours), daemon=True).start()
        service = pycriu.criu()
        service.use_fd(ours.fileno())
        service.opts = options
        try:
            return getattr(service, verb)()
        except pycriu.CRIUException as error:
            found = errors_in_log(log_path) or [str(error)]
            for line in found[1:]:
                log.error("criu %s: then: %s", verb, line)
            raise CriuError(f"criu {verb} failed: {found[0]}") from error
        finally:
            _wait(process)
            if verb == "dump":
                with suppress(ProcessLookupError):  # a zombie still has its number
                    os.killpg(process.pid, signal.SIGKILL)  # what it has left
            process.wait()


def _end_with(process: subprocess.Popen[bytes], answers: socket.socket) -> None:
    """Let nobody wait for an answer when CRIU has ended.

    CRIU looks at the kernel in children, which stand still until it ends them. If it is killed they
    are left, and hold the other end.
    """
    _wait(process)
    with suppress(OSError):  # the answer has been taken, and the socket closed
        answers.shutdown(socket.SHUT_RD)  # one that has arrived can still be read


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, and leave its number to it."""
    with suppress(ChildProcessError):  # its number has been given back
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def errors_in_log(log_path: Path) -> list[str]:
    """Return the errors in a log of CRIU, which goes with its folder; the first is the cause."""
    try:
        lines = log_path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    errors = [line for line in lines if "Error (" in line]
    # Without CAP_SYS_RESOURCE every log begins with this one, which is harmless.
    errors = [line for line in errors if "RLIMIT_NOFILE for self" not in line]
    return [re.sub(r"^.*?Error \([^)]*\):\s*", "", line) for line in errors]
