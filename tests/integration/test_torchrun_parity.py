"""torchmig-run does what torchrun does: same ranks, same output, same exit code, same log files."""

import json
import os
import re
import signal
import sys

import pytest
from running import JOBS, ForkedRun, Run

pytestmark = [pytest.mark.criu, pytest.mark.timeout(180)]

REPORT = JOBS / "report.py"
# What ranks have beyond torchrun's environment; on hosts with NVIDIA's driver NCCL settings come on
# top (docs/design.md).
ADDED = {"TORCHMIG_RANK_SOCKET", "TORCHMIG_RANK_PID", "UV_USE_IO_URING"}
# Different from run to run under torchrun already.
OWN_TO_A_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT")


class Outcome:
    """What a launcher and its ranks have done, with times, pids and ports taken out."""

    def __init__(self, run, log_dir):
        self.code = run.wait()
        self.out = ranks(run.text)
        self.errors = ranks(run.errors)
        self.messages = messages(run.errors)
        self.summary = summary(run.errors)
        self.logs = logs(log_dir) if log_dir is not None else {}
        self.text = f"{run.text}{run.errors}"


def ranks(text):
    """Return the ranks' lines in order, by what the line begins with."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"(.*?rank \d+) (.*)", line)
        if match and not re.match(r"[WEI]\d{4} ", line):
            found.setdefault(match[1], []).append(same(match[2]))
    return found


def same(line):
    if not line.startswith("{"):
        return line
    report = json.loads(line)
    environment = report["environment"]
    for name in OWN_TO_A_RUN:
        assert environment.pop(name)
    added = {name for name in environment if name in ADDED}
    assert added in (set(), ADDED)
    for name in added:
        del environment[name]
    return report


def messages(text):
    """Return what torch's own code logs."""
    found = []
    for line in text.splitlines():
        match = re.match(r"[WE]\d{4} \S+ \d+ [^\]]*\] (.*)", line)
        if match:
            line = re.sub(r"(pid: |process )\d+", r"\1N", match[1])
            line = re.sub(r"/python[0-9.]*$", "/python", line)
            found.append(re.sub(r"/\S+(?=/attempt_)", "LOGS", line))
    return sorted(found)


def summary(text):
    """Return the block of failures that torch prints at the end."""
    start = re.search(r"^=+$", text, re.MULTILINE)
    if start is None:
        return ""
    text = text[start.start() :]
    text = re.sub(r"[-=]{20,}", "-", text)
    text = re.sub(r"(time +: )\S+|(pid: |PID )\d+", r"\1\2N", text)
    return re.sub(r"(error_file: )/\S+", r"\1FILE", text)


def logs(log_dir):
    """Return the log files by their path below the folder of the run."""
    found = {}
    for path in sorted(log_dir.glob("*/attempt_*/**/*")):
        name = str(path.relative_to(log_dir)).split("/", 1)[1]
        if path.suffix == ".json":
            error = json.loads(path.read_text())
            del error["message"]["extraInfo"]["timestamp"]
            found[name] = error
        elif path.is_file():
            mode = oct(path.stat().st_mode)
            found[name] = (mode, ranks(path.read_text()))
        else:
            found[name] = None
    return found


def start_both(folder, *arguments, env=None, log_dir=False, start=ForkedRun):
    """Start torchrun and torchmig-run with the same arguments side by side."""
    runs = []
    for program in ("torchrun", "torchmig-run"):
        options = [f"--log-dir={folder}/{program}"] if log_dir else []
        runs.append(start(folder, *options, *arguments, program=program, env=env, name=program))
    return runs


def compare(folder, *arguments, env=None, log_dir=False, start=ForkedRun):
    """Check that both do the same, and return what that is."""
    runs = start_both(folder, *arguments, env=env, log_dir=log_dir, start=start)
    return compare_ended(folder, runs, log_dir)


def compare_ended(folder, runs, log_dir=False):
    theirs, ours = (
        Outcome(run, folder / program if log_dir else None)
        for program, run in zip(("torchrun", "torchmig-run"), runs, strict=True)
    )
    for what in ("code", "out", "errors", "logs", "messages", "summary"):
        assert getattr(ours, what) == getattr(theirs, what), (what, theirs.text, ours.text)
    return theirs


DASHES = ("-x", "--nproc-per-node=9", "--restore", "latest", "--", "--job=y", "--local-rank", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nproc-per-node=2", REPORT, "a", "b c"),
        ("--nproc-per-node=2", REPORT, *DASHES),
        ("--nproc_per_node", "2", "-m", "report", "a", *DASHES),
        ("--nproc-per-node=2", "--no-python", sys.executable, "-u", REPORT, "a", *DASHES),
        ("--standalone", "--nnodes=1", "--nproc-per-node=2", REPORT),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1:1", REPORT),
        ("--nproc-per-node=2", "--role=trainer", "--rdzv-id=x", "--monitor-interval=1", REPORT),
        (REPORT,),
    ],
    ids=["plain", "dashes", "module", "no-python", "standalone", "c10d", "role", "bare"],
)
def test_ranks_are_started_the_same(tmp_path, arguments):
    env = {"PYTHONPATH": path_with(JOBS), "MARK": "a\nb \u00e9"}
    start = Run if arguments == (REPORT,) else ForkedRun  # the shortest one as a shell does it
    found = compare(tmp_path, *arguments, env=env, start=start)
    assert found.code == 0
    for lines in found.out.values():
        assert lines[0]["environment"]["MARK"] == "a\nb \u00e9"


def path_with(folder):
    before = os.environ.get("PYTHONPATH")
    return f"{folder}{os.pathsep}{before}" if before else str(folder)


def test_settings_come_from_torchruns_variables(tmp_path):
    env = {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3", "PET_ROLE": "r", "PET_TEE": "3"}
    found = compare(tmp_path, REPORT, env=env)
    assert sorted(found.out) == ["[r0]:rank 0", "[r1]:rank 1"]
    assert found.out["[r1]:rank 1"][0]["environment"]["TORCHELASTIC_MAX_RESTARTS"] == "3"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("exit=3@1",), 1),
        (("exit=0@0", "exit=255@1"), 1),
        (("exit=4@0", "exit=4@1"), 1),
        (("kill=SIGKILL@1",), 1),
        (("kill=SIGABRT@0",), 1),
        (("raise@1",), 1),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_ranks_that_fail(tmp_path, words, code):
    # With 0.5 s between looks both failures of a pair are seen at once, under both launchers.
    found = compare(
        tmp_path, "--nproc-per-node=2", "--monitor-interval=0.5", REPORT, *words, log_dir=True
    )
    assert found.code == code
    assert "FAILED" in found.summary
    if "raise@1" in words:
        assert "ValueError: rank 1 cannot go on" in found.summary
        error = found.logs["attempt_0/1/error.json"]["message"]
        assert error["message"] == "ValueError: rank 1 cannot go on"


def test_a_restart_after_a_failure(tmp_path):
    found = compare(
        tmp_path, "--nproc-per-node=2", "--max-restarts=1", REPORT, "once", "exit=5@1", log_dir=True
    )
    assert found.code == 0
    lives = [line for line in found.out["rank 1"] if isinstance(line, dict)]
    counts = [line["environment"]["TORCHELASTIC_RESTART_COUNT"] for line in lives]
    assert counts == ["0", "1"]


def test_restarts_run_out(tmp_path):
    found = compare(tmp_path, "--max-restarts=1", REPORT, "exit=5@0", log_dir=True)
    assert found.code == 1
    assert len(found.out["rank 0"]) == 2


@pytest.mark.parametrize(
    "options",
    [
        ("--redirects=3",),
        ("--tee=3",),
        ("--redirects=3", "--tee=3"),
        ("--redirects=0:1,1:2", "--tee=0:2,1:1"),
        ("--redirects=2", "--local-ranks-filter=1"),
        ("--tee=3", "--local-ranks-filter=0"),
        ("--local-ranks-filter=0",),
        ("--tee=3", "--duplicate-stdout-filters=waits,environment"),
    ],
    ids=" ".join,
)
def test_log_files(tmp_path, options):
    found = compare(tmp_path, "--nproc-per-node=2", *options, REPORT, log_dir=True)
    assert found.code == 0
    assert "attempt_0/1" in found.logs


def test_prefixes_of_lines(tmp_path):
    template = "<${role_name} ${rank}/${local_rank}> "
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
    found = compare(tmp_path, "--nproc-per-node=2", "--tee=3", REPORT, env=env)
    assert sorted(found.out) == ["<default 0/0> rank 0", "<default 1/1> rank 1"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR2"])
def test_signals_to_the_launcher(tmp_path, name):
    handled = "SIGTERM,SIGINT,SIGHUP,SIGUSR2"
    runs = start_both(
        tmp_path, "--nproc-per-node=2", f"--signals-to-handle={handled}", REPORT, "wait"
    )
    for run in runs:
        run.wait_for(r"^rank 0 waits").wait_for(r"^rank 1 waits")
        run.signal(signal.Signals[name])
    found = compare_ended(tmp_path, runs)
    assert found.code == 1
    for lines in found.out.values():
        assert lines[1:] == ["waits", f"got {name}"]
    for run in runs:
        assert re.search(
            rf"SignalException: .* got signal: {signal.Signals[name].value}$", run.errors
        )


def test_signals_that_the_launcher_was_started_to_ignore(tmp_path):
    """As by nohup, or in the background of a shell that has no jobs."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (1, 3)}
    try:
        arguments = ("--nproc-per-node=2", "--signals-to-handle=SIGTERM", REPORT)
        runs = start_both(tmp_path, *arguments, start=Run)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    found = compare_ended(tmp_path, runs)
    assert found.code == 0
    for report, *_ in found.out.values():
        assert {1, 3} <= set(report["ignored"])


def test_a_function_in_the_launchers_own_interpreter(tmp_path):
    runs = start_both(tmp_path, "--nproc-per-node=2", "--run-path", REPORT, "a", "--b", start=Run)
    codes = [run.wait() for run in runs]
    reports = [ranks(run.text) for run in runs]
    assert codes[0] == codes[1]
    for theirs, ours in zip(*(sorted(report.items()) for report in reports), strict=True):
        assert theirs[0] == ours[0]
        assert theirs[1][0]["argv"] == ours[1][0]["argv"]
        assert theirs[1][0]["environment"] == ours[1][0]["environment"]


def test_a_script_that_does_not_exist(tmp_path):
    found = compare(tmp_path, tmp_path / "none.py", "a")
    assert found.code == 1
    assert "none.py FAILED" in found.summary


@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-such-option", REPORT),
        ("--nproc-per-node=2",),
        (),
        ("--max-restarts=x", REPORT),
    ],
    ids=["unknown option", "no script", "nothing", "not a number"],
)
def test_a_wrong_command_line(tmp_path, arguments):
    runs = start_both(tmp_path, *arguments)
    assert [run.wait() for run in runs] == [2, 2]
    theirs, ours = (run.errors.splitlines()[-1] for run in runs)
    assert ours == theirs.replace("torchrun:", "torchmig-run:")
    assert "Traceback" not in runs[1].errors


@pytest.mark.parametrize("arguments", [("--nproc-per-node=x", REPORT), ("--nnodes=a:b", REPORT)])
def test_a_number_of_ranks_that_is_none(tmp_path, arguments):
    """torchrun ends with a traceback and 1."""
    runs = start_both(tmp_path, *arguments)
    assert [run.wait() for run in runs] == [1, 1]
    theirs, ours = (run.errors.splitlines()[-1] for run in runs)
    assert ours == theirs
