"""Gloo does not hear of the end of connections once it has been muted."""

import subprocess
import sys

PROGRAM = """
import os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torchmig import _C

def sockets():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found

def watched():
    return {
        int(line.split()[1])
        for fd, target in sockets().items()
        if target == "anon_inode:[eventpoll]"
        for line in open(f"/proc/self/fdinfo/{fd}")
        if line.startswith("tfd:")
    }

before = _C.ProcessView.now()
store = dist.HashStore()
groups = [None, None]

def make(rank):
    groups[rank] = c10d.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=30))

threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
works = [groups[rank].recv([torch.zeros(4)], 1 - rank, 7) for rank in range(2)]
time.sleep(0.2)
_C.remember_torch(before, _C.ProcessView.now())
_C.remember_watched()

of_gloo = {fd for fd in watched() if sockets()[fd].startswith("socket:")}
assert len(of_gloo) >= 4, of_gloo  # a connection and a listener for each
if sys.argv[1] == "muted":
    _C.mute_torch_sockets()
    now = sockets()
    assert {now[fd] for fd in of_gloo} == {"anon_inode:[eventfd]"}, now
    assert of_gloo <= watched()
    # One side goes: the other one does not hear of it.
    groups[0] = works[0] = None
    time.sleep(0.2)
    assert works[1].is_completed() is False
    assert "socket:" in "".join(sockets().values())
    groups[1] = None
    _C.neutralise_torch_sockets()
    assert "socket:" not in "".join(sockets().values())
    time.sleep(0.2)
    assert works[1].is_completed() is False
else:
    groups[0] = works[0] = None
    time.sleep(0.2)
    assert works[1].is_completed() or len(of_gloo & watched()) < len(of_gloo)
works.clear()
print("ended", flush=True)
"""


def run(how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_connections_end_unheard_of():
    run("muted")


def test_gloo_hears_of_them_otherwise():
    """Or the test above would say nothing."""
    run("heard")
