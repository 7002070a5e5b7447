"""Prints how it was started, one line of JSON, and ends as its last argument says.

The words that count: exit=CODE@RANK, kill=SIGNAL@RANK, once (only in the first life), raise@RANK
(under torch's @record), wait (until a signal comes; say which, end with 0), daemon (leave a process
behind).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]
FIRST_LIFE = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def say(text, stream=1):
    # One write, so that lines of ranks which share a stream do not mix.
    os.write(stream, f"rank {RANK} {text}\n".encode())


def raise_recorded():
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def fail():
        raise ValueError(f"rank {RANK} cannot go on")

    fail()


def wait_for_signal():
    def caught(number, _frame):
        say(f"got {signal.Signals(number).name}")
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, caught)
    say("waits")
    while True:
        time.sleep(1)


def main():
    report = {
        "argv": sys.argv,
        "executable": os.path.realpath(sys.executable),
        "flags": list(sys.flags),
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "umask": oct(os.umask(0o22)),
        "session_leader": os.getsid(0) == os.getpid(),
        "ignored": [
            number for number in range(1, 32) if signal.getsignal(number) == signal.SIG_IGN
        ],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }
    say(json.dumps(report))
    say("speaks on standard error", stream=2)
    if "daemon" in sys.argv:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if "once" in sys.argv and not FIRST_LIFE:
        return
    for word in sys.argv:
        name, _, of = word.partition("@")
        if of != RANK:
            continue
        if name == "raise":
            raise_recorded()
        what, _, value = name.partition("=")
        if what == "exit":
            sys.exit(int(value))
        if what == "kill":
            os.kill(os.getpid(), signal.Signals[value])
    if "wait" in sys.argv or any("@" in word for word in sys.argv):
        wait_for_signal()


main()
