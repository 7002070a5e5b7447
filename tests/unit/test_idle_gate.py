"""While nobody asks for a checkpoint the gate takes no lock, allocates nothing, calls no kernel.

The same calls are made with the gate and without. Python and torch allocate and lock by themselves,
so it is the difference that has to be nothing.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from c_library import build

JOBS = Path(__file__).resolve().parents[1] / "jobs"
# From linux/ptrace.h.
PTRACE_SYSCALL, PTRACE_DETACH = 24, 17
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_GET_SYSCALL_INFO = 0x4206, 0x4207, 0x420E
PTRACE_O_TRACESYSGOOD = 1
ENTRY = 1
GETPRIORITY = 140  # of x86-64; encloses what is counted


class SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request, pid, address=0, data=0):
    if libc.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")


def system_calls(process):
    """Let the process's main thread go on, and count between its two calls of getpriority()."""
    pid = process.pid
    ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACESYSGOOD)
    ptrace(PTRACE_INTERRUPT, pid)
    process.stdin.write(b"\n")
    process.stdin.close()
    info = SyscallInfo()
    inside, count = False, 0
    while True:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSTOPPED(status), "the job has ended under the tracer"
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP | 0x80:
            ptrace(PTRACE_GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            if info.op == ENTRY and info.number == GETPRIORITY:
                if inside:
                    ptrace(PTRACE_DETACH, pid)
                    return count
                inside = True
            elif info.op == ENTRY:
                count += inside
        passed_on = number if number not in (signal.SIGTRAP, signal.SIGTRAP | 0x80) else 0
        ptrace(PTRACE_SYSCALL, pid, 0, passed_on)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("counted") / "counted.so"
    return build(path, (JOBS / "counted.c").read_text(), "-ldl")


def cost(library, kind):
    job = subprocess.Popen(
        [sys.executable, JOBS / "idle_gate.py", kind],
        env={**os.environ, "LD_PRELOAD": str(library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with job:
        assert job.stdout.readline() == b"ready\n"
        calls = system_calls(job)
        found = json.loads(job.stdout.readline())
        job.wait()
    return {**found, "system_calls": calls}


def test_it_takes_no_lock_allocates_nothing_and_calls_no_kernel(library):
    plain, gated = cost(library, "plain"), cost(library, "gated")
    # The counters count: each call makes a Work, and the job asks once for its parent.
    assert plain["allocations"] > plain["calls"] < plain["locks"]
    assert plain["system_calls"] >= 1
    for what in ("allocations", "locks", "system_calls"):
        # One a call would be thousands more.
        assert abs(gated[what] - plain[what]) < plain["calls"] / 100, (what, plain, gated)
