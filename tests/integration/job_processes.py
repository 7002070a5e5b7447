"""Finds the processes of a job by the folder that it was started in."""

import hashlib
from pathlib import Path

from waiting import wait_until

MARK = "TEST_FOLDER"  # a variable that holds the folder, for what changes its working directory


def job_of(folder):
    """Return a name for the job of this folder that no other job on this machine has."""
    return f"job-{hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()}"


def processes(folder):
    """Return {pid: command line} of all that was started in the folder.

    Rank-inits have none of the environment, and CRIU has another working directory.
    """
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = (process / "cwd").readlink().is_relative_to(folder)
            if not here and f"\0{MARK}={folder}\0".encode() not in environment(process):
                continue
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is a zombie
            continue
        found[int(process.name)] = b" ".join(words).decode(errors="replace")
    return found


def environment(process):
    return b"\0" + (process / "environ").read_bytes() + b"\0"


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has ended


def assert_nothing_left(folder):
    wait_until(lambda: not processes(folder), lambda: f"left: {processes(folder)}")
