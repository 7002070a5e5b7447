"""A rank that answers, on the port of 127.0.0.1 that it prints, whoever connects.

    torchmig-run listening.py STEPS MAY_END

The last step is not taken before the file MAY_END exists.
"""

import socket
import sys
import threading
import time
from pathlib import Path

from lean import torch

STEPS, MAY_END = int(sys.argv[1]), Path(sys.argv[2])


def answer(server):
    while True:
        with server.accept()[0] as connection:
            connection.sendall(b"here")


def main():
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, args=(server,), daemon=True).start()
    print(f"rank 0 listens {server.getsockname()[1]}", flush=True)
    state = torch.ones(4)
    for step in range(STEPS):
        state = torch.sin(state) + 1
        print(f"rank 0 step {step} {state.double().sum().item():.12e}", flush=True)
        time.sleep(0.02)
        while step == STEPS - 2 and not MAY_END.exists():
            time.sleep(0.01)
    print("rank 0 end", flush=True)


main()
