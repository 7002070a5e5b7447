"""Two agents of one job: one snapshot of all, and nothing half done when an agent is lost."""

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from running import JOBS, Run, by_rank, snapshots, unbroken

from torchmig.agent.control import agents, ask
from torchmig.repo import Repository

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder, rendezvous, *arguments, own=((), ())):
    """Start two agents, each with options of its own, that meet at a port free a moment ago."""
    port = free_port()
    runs = []
    for node in range(2):
        if rendezvous == "static":
            meeting = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        else:
            meeting = [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--rdzv-id=job{port}",
            ]
        runs.append(Run(folder, "--nnodes=2", *meeting, *own[node], *arguments))
    return runs


def dry_runs(runs):
    """Ask each agent for a dry run and return where the ranks stood."""
    pids = [run.process.pid for run in runs]
    sockets = [path for path, status in agents(Path("/run/torchmig")) if status["pid"] in pids]
    assert len(sockets) == len(runs)
    return [ask(path, {"do": "dry-run"})["stand"] for path in sockets]


def end(runs, code):
    for run in runs:
        assert run.wait() == code, f"{run.text}{run.errors}"


def test_a_signal_to_either_agent_suspends_the_whole_job(tmp_path):
    """And agents that have met in another way restore it."""
    steps = "60"
    runs = start(tmp_path, "c10d", "--nproc-per-node=2", JOBS / "plain.py", steps, "0.03")
    texts = []
    for step, asked, rendezvous in ((4, 1, "static"), (12, 0, "c10d")):
        runs[0].wait_for_step(step)
        for stand in dry_runs(runs):
            assert [rank["rank"] for rank in stand] == [0, 1, 2, 3]
        runs[asked].signal(signal.SIGUSR2)
        end(runs, 85)
        texts += [run.text for run in runs]
        runs = start(tmp_path, rendezvous, "--restore=latest")
    end(runs, 0)
    assert len(snapshots(tmp_path)) == 2
    texts += [run.text for run in runs]
    assert by_rank(*texts) == unbroken(4, "plain.py", steps)


def test_agents_that_would_restore_different_things_refuse(tmp_path):
    script = (JOBS / "ring.py", "100000")
    Run(tmp_path, "--nproc-per-node=2", *script).wait_for_step(3).suspend()
    with Repository.open(str(tmp_path / "torchmig-repo")) as repository:
        first = repository.load("latest")
        ids = [first.id, repository.commit(replace(first, tags=["again"]))]
    anew = ("--nproc-per-node=1", *script)
    for own in ([(f"--restore={each}",) for each in ids], [anew, (f"--restore={ids[0]}",)]):
        runs = start(tmp_path, "static", own=own)
        assert runs[1].wait() == 21, runs[1].errors
        assert "on every node" in runs[1].errors
        assert runs[1].text == ""
        if own[0] is anew:
            runs[0].kill()  # its rank waits for the other one, as under torchrun
        else:
            assert runs[0].wait() == 21, runs[0].errors
            assert f"the agent of node 1 restores snapshot {ids[1][:8]}" in runs[0].errors


@pytest.mark.parametrize("lost", [0, 1], ids=["coordinator", "other"])
def test_an_agent_lost_in_a_request_leaves_no_snapshot_and_no_hang(tmp_path, lost):
    script = (JOBS / "plain.py", "4000", "0.03")
    runs = start(tmp_path, "static", "--nproc-per-node=1", "--deadline=20s", *script)
    runs[0].wait_for_step(4)
    runs[0].signal(signal.SIGUSR2).wait_for("torchmig: cut")
    os.kill(runs[lost].process.pid, signal.SIGKILL)
    runs[lost].wait()
    # The ranks of the other node miss their peers, as under torchrun, and the job fails.
    assert runs[1 - lost].wait() not in (0, 85)
    assert snapshots(tmp_path) == []
    deadline = time.monotonic() + 20
    while left := processes_in(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def processes_in(folder):
    """Return the processes whose working folder is the job's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found
