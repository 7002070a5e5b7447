"""A checkpoint that fails, at any phase, leaves the job training, with the same results."""

import os
import random
import re
import signal
from pathlib import Path

import pytest
from c_library import build
from faulty import mortal_criu, mounted, orphaning_criu, remount
from running import JOBS, by_rank, snapshots, unbroken
from running import ForkedRun as Run

from torchmig.capture.device import environment

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

STEPS = "120"
SECONDS = "0.03"


def fails_and_trains_on(folder, reason, *options, number=signal.SIGUSR2, env=None):
    script = (JOBS / "plain.py", STEPS, SECONDS)
    run = Run(folder, "--nproc-per-node=2", *options, *script, env=env)
    run.wait_for_step(4).signal(number)
    run.wait_for(rf"torchmig-run: .* withdrawn, the job goes on: .*{reason}").finish()
    assert by_rank(run.text) == unbroken(2, "plain.py", STEPS)
    assert "Traceback" not in run.errors
    return run


def test_repository_that_is_a_file(tmp_path):
    (tmp_path / "repo").write_text("not a folder")
    fails_and_trains_on(tmp_path, "repo", "--repo=repo", number=signal.SIGUSR1)


def test_criu_that_is_missing(tmp_path):
    run = fails_and_trains_on(tmp_path, "cannot use CRIU", env={"TORCHMIG_CRIU": "/none/criu"})
    assert run.errors.count("this job cannot be checkpointed") == 1


def test_one_failure_after_the_other_and_then_it_works(tmp_path, criu):
    after, may_end = tmp_path / "after", tmp_path / "may-end"
    env = {"TORCHMIG_CRIU": str(mortal_criu(tmp_path / "usr", criu, after))}
    with (
        mounted(tmp_path / "disk", "size=4m") as disk,
        mounted(tmp_path / "work", "size=2g") as work,
    ):
        options = ("--nproc-per-node=2", f"--repo={disk}/repo", f"--work-dir={work}")
        script = (JOBS / "ddp.py", STEPS, SECONDS, may_end)
        run = Run(tmp_path, *options, *script, env=env).wait_for_step(4)

        def fails(reason, number=signal.SIGUSR2):
            run.signal(number).wait_for(rf"torchmig-run: .* withdrawn, the job goes on: .*{reason}")
            assert list(work.iterdir()) == []

        fails("no space left")
        assert snapshots(tmp_path, disk / "repo") == []
        remount(disk, "ro")
        fails("[Rr]ead-only")
        remount(disk, "rw,size=2g")
        remount(work, "size=4m")
        fails("make room or set '--work-dir'", signal.SIGUSR1)
        remount(work, "size=2g")
        after.write_text("0.08")
        fails("criu dump failed")
        after.unlink()
        assert "Traceback" not in run.errors
        assert snapshots(tmp_path, disk / "repo") == []
        run.signal(signal.SIGUSR1).wait_for("checkpointed into snapshot").suspend()
        may_end.touch()
        again = Run(tmp_path, f"--repo={disk}/repo", "--restore=latest").finish()
        assert by_rank(run.text, again.text) == unbroken(2, "ddp.py", STEPS)


def test_criu_that_is_killed_and_leaves_a_child(tmp_path, criu):
    """It has children for a moment, which hold the socket that its answer is awaited on."""
    seconds = f"{random.randint(1000, 9999)}.5"
    env = {"TORCHMIG_CRIU": str(orphaning_criu(tmp_path / "usr", criu, seconds))}
    fails_and_trains_on(tmp_path, "criu dump failed", number=signal.SIGUSR1, env=env)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert [command for command in commands if seconds.encode() in command] == []


HELD = {
    "io_uring": "io_uring, which CRIU cannot dump",
    "tcp": "TCP connection to 127.0.0.1:",
    "half_tcp": "TCP connection to 127.0.0.1:",
    "backend": r"it calls a Backend object by itself \(allreduce\)",
}


def test_a_rank_that_holds_what_cannot_be_dumped(tmp_path):
    script = (JOBS / "holding.py", *HELD)
    run = Run(tmp_path, "--nproc-per-node=2", *script, env={"ORDERS": str(tmp_path)})
    for count, (hold, reason) in enumerate(HELD.items(), 1):
        run.wait_for(f"rank 1 {hold} step 4 ").signal(signal.SIGUSR2)
        run.wait_for_count("withdrawn, the job goes on: ", count)
        assert re.search(f"rank 1: .*{reason}", run.errors.split("withdrawn")[count])
        (tmp_path / f"drop-{hold}").touch()
    run.finish()
    assert "Traceback" not in run.errors
    assert by_rank(run.text) == unbroken(2, "holding.py", *HELD)
    assert snapshots(tmp_path) == []


NCCL = r"""
// Communicates with itself, as far as sockets tell.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

static int ends[2];

int open_ends(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof(address);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr*)&address, size) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr*)&address, &size) != 0 ||
        connect(ends[0], (struct sockaddr*)&address, size) != 0) {
        return 1;
    }
    ends[1] = accept(listener, 0, 0);
    return ends[1] < 0 || close(listener) != 0;
}

void close_ends(void) {
    close(ends[0]);
    close(ends[1]);
}
"""

COMMUNICATING = """
import ctypes, os, runpy, sys, threading, time
from pathlib import Path

library, drop, script = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def close():
    while not drop.exists():
        time.sleep(0.01)
    library.close_ends()
    print("closed", file=sys.stderr, flush=True)

if os.environ["RANK"] == "1":
    assert library.open_ends() == 0
    threading.Thread(target=close).start()
sys.argv = sys.argv[3:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def test_a_communicator_that_is_not_torchs(tmp_path):
    """NCCL without a GPU is a library of its name that opens connections."""
    library, drop = build(tmp_path / "libnccl.so.2", NCCL), tmp_path / "drop"
    script = tmp_path / "communicating.py"
    script.write_text(COMMUNICATING)
    job = (JOBS / "plain.py", STEPS, SECONDS)
    env = {"LD_PRELOAD": str(environment.preload_library())}
    run = Run(tmp_path, "--nproc-per-node=2", script, library, drop, *job, env=env)
    run.wait_for_step(4)
    said = r"withdrawn, the job goes on: rank 1: process \d+ has an NCCL communicator .*destroy it"
    for count, request in enumerate((signal.SIGUSR1, signal.SIGUSR2), 1):
        run.signal(request).wait_for(rf"({said}[^$]*){{{count}}}")
    assert snapshots(tmp_path) == []
    drop.touch()
    run.wait_for("closed")
    run.suspend()
    again = Run(tmp_path, "--restore=latest", env=env).finish()
    assert by_rank(run.text, again.text) == unbroken(2, "plain.py", STEPS, SECONDS)


def test_what_is_half_written_is_not_listed(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=2", JOBS / "plain.py", STEPS, SECONDS)
    run.wait_for_step(4).signal(signal.SIGUSR2).wait_for("torchmig: dump: in")
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    assert snapshots(tmp_path) == []


FALLIBLE = """
import os, runpy, sys
from pathlib import Path
from torchmig.worker import communication

fault, script = Path(sys.argv[1]), sys.argv[2]

def fallible(name):
    original = getattr(communication, name)

    def phase(*arguments):
        if os.environ["RANK"] == "1" and fault.exists() and fault.read_text() == name:
            fault.unlink()
            raise RuntimeError(f"{name} fails on purpose")
        return original(*arguments)

    setattr(communication, name, phase)

fallible("mute")
fallible("take_down")
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def test_communication_that_is_half_down_comes_back(tmp_path):
    """One rank of two fails at it: the other one is down already, or cut off and not down yet."""
    fault, script = tmp_path / "fault", tmp_path / "fallible.py"
    script.write_text(FALLIBLE)
    job = (script, fault, JOBS / "plain.py", STEPS, SECONDS)
    run = Run(tmp_path, "--nproc-per-node=2", *job).wait_for_step(4)
    for number, name in enumerate(("mute", "take_down", "mute"), start=1):
        fault.write_text(name)
        run.signal(signal.SIGUSR1).wait_for_count("withdrawn, the job goes on: ", number)
        assert f"{name} fails on purpose" in run.errors.rsplit("withdrawn", 1)[-1]
    run.signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
    assert by_rank(run.finish().text) == unbroken(2, "plain.py", STEPS)
