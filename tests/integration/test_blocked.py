"""A request that meets ranks in an awkward place ends in a snapshot or is called off."""

import json
import signal
import subprocess

import pytest
from job_processes import job_of
from running import BIN, JOBS, by_rank, torchmig, unbroken
from running import ForkedRun as Run

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

BLOCKED = JOBS / "blocked.py"
# DDP, in "backward", comes late: it makes the snapshots larger.
WAITED_FOR = ["before", "collective", "sleep", "loader", "backward", "after"]


def expected(modes):
    """Return what is printed without requests, however long the ranks are busy."""
    return unbroken(2, "blocked.py", modes, "0")


def test_a_busy_rank_is_waited_for_and_one_that_has_ended_is_not(tmp_path):
    modes = ",".join([*WAITED_FOR, "peer-ended"])
    run = Run(tmp_path, "--nproc-per-node=2", BLOCKED, modes, "3")
    texts = []
    for mode in WAITED_FOR:
        texts.append(run.wait_for(rf"^rank \d is busy: {mode}$").suspend().text)
        run = Run(tmp_path, "--restore=latest")
    run.wait_for("^rank 0 is busy: peer-ended$").signal(signal.SIGUSR2)
    run.wait_for("withdrawn, the job goes on: .*rank 1 has ended").finish()
    assert by_rank(*texts, run.text) == expected(modes)


def test_native_code_is_waited_for_until_the_deadline_and_explained(tmp_path):
    """It cannot be interrupted: a request is pending for as long as it takes."""
    job = job_of(tmp_path)
    script = (BLOCKED, "native", "12")
    run = Run(tmp_path, "--nproc-per-node=2", "--deadline=3s", f"--job={job}", *script)
    run.wait_for(r"^rank 0 is busy").signal(signal.SIGUSR2)
    run.wait_for("withdrawn, the job goes on: .*no stand within 3 s")
    with subprocess.Popen([BIN / "torchmig", "suspend", job, "--deadline=60s", "--quiet"]) as verb:
        text = ""
        while "rank 0" not in text:
            assert run.process.poll() is None
            text = json.loads(torchmig("explain", job, "--json").stdout)["text"]
        assert "wait_in_native_code(SECONDS)" in text
        assert run.wait() == 85
    assert verb.returncode == 0
    again = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == expected("native")


def test_sleep_goes_on_after_the_restore(tmp_path):
    run = Run(tmp_path, BLOCKED, "sleep", "600").wait_for("rank 0 is busy").suspend()
    again = Run(tmp_path, "--restore=latest").wait_for("restored from snapshot")
    assert again.process.poll() is None
    assert again.signal(signal.SIGTERM).wait() != 0
    assert " end " not in run.text + again.text


def test_ranks_that_leave_their_group_one_by_one(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=3", JOBS / "leaving.py", tmp_path)
    (tmp_path / "leave-0").touch()
    run.wait_for("^rank 0 has left").signal(signal.SIGUSR2)
    run.wait_for("the job goes on: process group '0' has been destroyed by 1 of its 3 ranks, ")
    (tmp_path / "leave-1").touch()
    run.wait_for("^rank 1 has left").signal(signal.SIGUSR1).wait_for("checkpointed into snapshot")
    run.suspend()
    for order in ("leave-2", "end"):
        (tmp_path / order).touch()
    again = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == unbroken(3, "leaving.py")
