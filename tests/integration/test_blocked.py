"""A request that meets ranks in an awkward place ends in a snapshot or is called off."""

import signal

import pytest
from running import JOBS, Run, by_rank, torchmig, unbroken

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]


@pytest.mark.parametrize("mode", ["collective", "sleep", "backward", "loader", "before", "after"])
def test_a_busy_rank_is_waited_for(tmp_path, mode):
    arguments = (mode, "4")
    run = Run(tmp_path, "--nproc-per-node=2", "--deadline=90s", JOBS / "blocked.py", *arguments)
    run.wait_for(r"^rank \d is busy").suspend()
    again = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(run.text, again.text) == unbroken(2, "blocked.py", *arguments)


@pytest.mark.parametrize(
    ("mode", "seconds", "deadline", "reason"),
    [
        ("native", "10", "3s", "no stand within 3 s"),
        ("peer-ended", "8", "60s", "rank 1 has ended"),
    ],
)
def test_what_cannot_be_waited_for_is_called_off(tmp_path, mode, seconds, deadline, reason):
    script = (JOBS / "blocked.py", mode, seconds)
    run = Run(tmp_path, "--nproc-per-node=2", f"--deadline={deadline}", *script)
    run.wait_for(r"^rank 0 is busy").signal(signal.SIGUSR2)
    run.wait_for(rf"withdrawn, the job goes on: .*{reason}").finish()
    assert by_rank(run.text) == unbroken(2, "blocked.py", mode, seconds)


def test_sleep_goes_on_after_the_restore(tmp_path):
    run = Run(tmp_path, JOBS / "blocked.py", "sleep", "600").wait_for("rank 0 is busy").suspend()
    again = Run(tmp_path, "--restore=latest").wait_for("restored from snapshot")
    assert again.process.poll() is None
    assert again.signal(signal.SIGTERM).wait() != 0
    assert " end " not in run.text + again.text


def test_explain_names_the_rank_that_is_waited_for(tmp_path):
    # In native code, which cannot be interrupted: the request is pending for as long as it takes.
    script = (JOBS / "blocked.py", "native", "15")
    run = Run(tmp_path, "--nproc-per-node=2", "--deadline=60s", f"--job={tmp_path.name}", *script)
    run.wait_for(r"^rank 0 is busy").signal(signal.SIGUSR2)
    run.wait_for("preflight")
    text = ""
    while "rank 0" not in text:
        assert run.process.poll() is None
        text = torchmig("explain", tmp_path.name).stdout
    assert "wait_in_native_code(SECONDS)" in text
    assert run.wait() == 85


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
