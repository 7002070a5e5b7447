"""Lets itself be held at the gate, as its own agent, and prints how the gate's version grew."""

import json
import signal
import socket
import sys
import threading

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmig import _C
from torchmig.worker import groups

GATE = 2


def main():
    _C.install_gate()
    groups.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(1)
        _C.start_control(sys.argv[1], 0, 4, int(signal.SIGRTMAX))
        connection, _ = listener.accept()
    messages = map(json.loads, connection.makefile("r"))
    # Request 1, serial 1, not final, no targets: nothing may be issued.
    connection.sendall(f"order 1 1 {GATE} 0 0\n".encode())
    next(message for message in messages if message["type"] == "report")
    before = _C.gate_version()
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
    thread.start()
    report = next(message for message in messages if message.get("waiting"))
    growth = _C.gate_version() - before
    connection.sendall(b"release\n")
    thread.join()
    print(json.dumps({"report": report, "growth": growth}))


main()
