"""The verbs that talk to running jobs, against an agent's real control socket."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmig.agent.control import ControlServer, socket_path
from torchmig.commands._main import main
from torchmig.commands.ps import _ranges
from torchmig.errors import DeadlineMissedError, ExitCode

STATUS = {
    "job": "gpt-1a2b",
    "pid": 4242,
    "node": 0,
    "nodes": 2,
    "world_size": 4,
    "ranks": [0, 1],
    "pids": [10001, 10002],
    "gpus": [],
    "state": "running",
    "last_snapshot": "ab" * 32,
    "repo": "/r",
    "local_cache": None,
    "unfit": "",
}
OUTCOME = {
    "snapshot": "cd" * 32,
    "times": {"t_cut": 0.5, "t_release": 1.25, "t_durable": 2.0},
    "sizes": {"stored_bytes": 1 << 20, "read_bytes": 3 << 20},
}

STOOD = {
    "times": {"t_cut": 0.125, "t_quiet": 0.25, "stall": 0.2},
    "stand": [
        {"rank": rank, "place": place, "waiting": [], "asked_at_step": 6, "step": 7}
        for rank, place in enumerate(["boundary", "gate", "boundary", "boundary"])
    ],
}


@pytest.fixture
def runtime_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHMIG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def agent(runtime_dir):
    """An agent's control socket; what it was asked is in `asked`, what it answers in `outcome`."""

    agent = SimpleNamespace(asked=[], outcome=OUTCOME, status=STATUS)

    def serve(request):
        if request["do"] == "status":
            return agent.status
        agent.asked.append(request)
        if isinstance(agent.outcome, Exception):
            raise agent.outcome
        return agent.outcome

    server = ControlServer(socket_path(runtime_dir, "gpt-1a2b"), serve)
    yield agent
    server.close()


def test_ps_lists_agents_and_skips_sockets_left_over(agent, runtime_dir, capsys):
    left_over = runtime_dir / "old" / "agent-1.sock"
    left_over.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left_over))
    assert main(["ps"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["job", "pid", "node", "ranks", "state", "last", "snapshot"]
    assert line.split() == [
        "gpt-1a2b",
        "4242",
        "1",
        "of",
        "2",
        "0-1",
        "of",
        "4",
        "running",
        "abababab",
    ]
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [STATUS]


def test_ps_shows_gpus_beside_a_job_that_has_none(agent, runtime_dir, capsys):
    used = [
        {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H200"}
        | {"used_bytes": 3 << 30, "total_bytes": 140 << 30}
        for index in (1, 2)
    ]
    other = {**STATUS, "job": "other", "gpus": used}
    server = ControlServer(socket_path(runtime_dir, "other-3c4d"), lambda request: other)
    try:
        assert main(["ps"]) == 0
    finally:
        server.close()
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.endswith("gpus")
    shown = {line.split()[0]: line[header.index("gpus") :] for line in lines}
    assert shown == {"gpt-1a2b": "-", "other": "1,2 (NVIDIA H200), 6.000 GiB in use"}


def test_ps_without_jobs_is_an_empty_list(runtime_dir, capsys):
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("verb", ["checkpoint", "suspend"])
@pytest.mark.parametrize("name", ["gpt-1a2b", "gpt"])
def test_request_reaches_the_agent_and_its_outcome_comes_back(agent, capsys, verb, name):
    assert main([verb, name]) == 0
    assert agent.asked[-1] == {"do": verb}
    text = capsys.readouterr().out
    assert "snapshot cdcdcdcd: t_cut 0.50 s, t_release 1.25 s, t_durable 2.00 s" in text
    assert "1.000 MiB newly stored of 3.000 MiB" in text
    assert main([verb, name, "--deadline", "1m", "--json"]) == 0
    assert agent.asked[-1] == {"do": verb, "deadline_seconds": 60.0}
    assert json.loads(capsys.readouterr().out) == OUTCOME


def test_a_snapshot_that_is_on_the_nodes_only_is_called_so(agent, capsys):
    agent.outcome = OUTCOME | {"on_node_only": "the server does not answer"}
    assert main(["suspend", "gpt"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "on this job's nodes only: the server does not answer"


def test_dry_run_says_where_the_ranks_stood_and_names_no_snapshot(agent, capsys):
    agent.outcome = STOOD
    assert main(["checkpoint", "gpt", "--dry-run", "--deadline", "5s"]) == 0
    assert agent.asked[-1] == {"do": "dry-run", "deadline_seconds": 5.0}
    text = capsys.readouterr().out
    assert text.splitlines() == [
        "3 ranks at a step boundary, 1 between two operations: t_cut 0.12 s, t_quiet 0.25 s",
        "nothing was saved, the job goes on",
    ]
    assert main(["checkpoint", "gpt", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STOOD


def test_request_that_fails_brings_the_agents_sentence_and_code(agent, capsys):
    agent.outcome = DeadlineMissedError("suspend of job 'gpt-1a2b' withdrawn: rank 1 did not come")
    assert main(["suspend", "gpt"]) == ExitCode.DEADLINE
    assert capsys.readouterr().err == (
        "torchmig: suspend of job 'gpt-1a2b' withdrawn: rank 1 did not come\n"
    )
    assert main(["suspend", "gpt", "--json"]) == ExitCode.DEADLINE
    assert json.loads(capsys.readouterr().err)["error"] == "DeadlineMissedError"


def test_request_that_fails_as_nobody_foresaw_is_answered_too(agent, capsys, caplog):
    agent.outcome = OSError(28, "No space left on device")
    assert main(["suspend", "gpt"]) == ExitCode.FAILED
    assert "torchmig: OSError: [Errno 28] No space left" in capsys.readouterr().err
    assert 'a request failed: {"do": "suspend"}' in caplog.text


def test_agent_that_has_been_closed_listens_no_more(runtime_dir):
    server = ControlServer(socket_path(runtime_dir, "gpt"), lambda request: request)
    (thread,) = [each for each in threading.enumerate() if each.name == "control"]
    server.close()
    thread.join(30)
    assert not thread.is_alive()


def test_job_that_is_not_there_is_a_usage_error(runtime_dir, capsys):
    assert main(["suspend", "gpt"]) == ExitCode.USAGE
    assert "no job 'gpt' runs on this host" in capsys.readouterr().err


def test_a_job_of_several_nodes_is_not_suspended_by_migrate(agent, capsys):
    assert main(["migrate", "gpt"]) == ExitCode.USAGE
    assert "it runs on 2 nodes; use 'torchmig suspend'" in capsys.readouterr().err
    assert agent.asked == []


def test_a_gpu_that_is_not_there_is_found_before_a_job_is_suspended(agent, capsys):
    agent.status = STATUS | {"nodes": 1}
    assert main(["migrate", "gpt", "--gpus", "GPU-none"]) == ExitCode.USAGE
    assert "no GPU 'GPU-none' on this host" in capsys.readouterr().err
    assert agent.asked == []


def test_a_job_is_not_suspended_where_nothing_can_restore_it(agent, capsys, monkeypatch, tmp_path):
    agent.status = STATUS | {"nodes": 1}
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "torchmig")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["migrate", "gpt"]) == ExitCode.USAGE
    assert "there is no 'torchmig-run' beside" in capsys.readouterr().err
    assert agent.asked == []


def test_migrate_becomes_the_torchmig_run_beside_it(agent, runtime_dir, tmp_path):
    agent.status = STATUS | {"nodes": 1, "local_cache": "/c"}
    programs = {
        "torchmig": f"{sys.executable}\nfrom torchmig.commands._main import main\nmain()\n",
        "torchmig-run": '/bin/sh\nprintf "%s\\n" "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!{text}")
        (tmp_path / name).chmod(0o755)
    answer = subprocess.run(
        [tmp_path / "torchmig", "migrate", "gpt", "--deadline=5s", "--quiet"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert agent.asked == [{"do": "suspend", "deadline_seconds": 5.0}]
    assert answer.stdout.splitlines() == [
        "suspended into cdcdcdcd",
        f"--restore={OUTCOME['snapshot']}",
        "--repo=/r",
        "--local-cache=/c",
        f"--runtime-dir={runtime_dir}",
        "--quiet",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([5], "5"), ([3, 0, 1, 2, 8], "0-3,8"), ([1, 3], "1,3")]
)
def test_ranges(numbers, text):
    assert _ranges(numbers) == text
