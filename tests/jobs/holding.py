"""Two gloo ranks, of which one holds something that cannot be dumped, or both call a Backend.

The arguments say what, one after the other. With ORDERS each is held until that folder has a file
drop-WHAT.
"""

import contextlib
import ctypes
import os
import socket
import sys
import time
from pathlib import Path

from lean import dist, torch

ORDERS = os.environ.get("ORDERS")
STEPS = 10
IO_URING_SETUP = 425


@contextlib.contextmanager
def io_uring():
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))
    assert fd >= 0, ctypes.get_errno()
    yield
    os.close(fd)


@contextlib.contextmanager
def tcp():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0],
    ):
        yield


@contextlib.contextmanager
def half_tcp():
    """As a pool of connections keeps one that its server has given up."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        server.accept()[0].close()
        yield


HELD = {"io_uring": io_uring, "tcp": tcp, "half_tcp": half_tcp}


def steps(what, rank, state):
    for step in range(STEPS):
        if what == "backend":
            dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([state]).wait()
        else:
            dist.all_reduce(state)
        state = torch.sin(state) + rank
        print(f"rank {rank} {what} step {step} {state.double().sum().item():.12e}", flush=True)
        while step == STEPS - 1 and ORDERS and not Path(ORDERS, f"drop-{what}").exists():
            time.sleep(0.01)
    return state


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = torch.ones(4) * (rank + 1)
    for what in sys.argv[1:]:
        with HELD[what]() if rank == 1 and what in HELD else contextlib.nullcontext():
            state = steps(what, rank, state)
    print(f"rank {rank} end", flush=True)
    dist.destroy_process_group()


main()
