"""A rank that asks a server what to add at each step, over one connection for as long as it lasts.

torchmig-run connected.py HOST PORT STEPS
"""

import http.client
import sys
import time

from lean import torch

STEPS = int(sys.argv[3])


def asked(connection, step):
    """Return the answer, over a new connection if the old one has gone, as clients do."""
    try:
        return ask(connection, step)
    except (OSError, http.client.HTTPException):
        connection.close()
        return ask(connection, step)


def ask(connection, step):
    connection.request("GET", f"/{step}")
    return int(connection.getresponse().read())


def main():
    connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=20)
    state = torch.ones(4)
    for step in range(STEPS):
        state = torch.sin(state) + asked(connection, step)
        print(f"rank 0 step {step} {state.double().sum().item():.12e}", flush=True)
        time.sleep(0.02)
    connection.close()
    print("rank 0 end", flush=True)


main()
