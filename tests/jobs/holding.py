"""Two gloo ranks, of which one holds something that cannot be dumped, or both call a Backend."""

import ctypes
import socket
import sys
import time

from lean import dist, torch

HOLD, STEPS = sys.argv[1], int(sys.argv[2])
IO_URING_SETUP = 425


def hold():
    if HOLD == "io_uring":
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))
        assert fd >= 0, ctypes.get_errno()
        return [fd]
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    return [server, client, server.accept()]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    held = hold() if rank == 1 and HOLD != "backend" else []
    state = torch.ones(4) * (rank + 1)
    for step in range(STEPS):
        if HOLD == "backend":
            dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([state]).wait()
        else:
            dist.all_reduce(state)
        state = torch.sin(state) + rank
        print(f"rank {rank} step {step} {state.double().sum().item():.12e}", flush=True)
        time.sleep(0.05)
    print(f"rank {rank} end {len(held)}", flush=True)
    dist.destroy_process_group()


main()
