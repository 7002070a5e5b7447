"""Whatever dies first, no process of a job is left."""

import os
import re
import signal
import time

import pytest
from job_processes import MARK, assert_nothing_left, job_of, parent, processes
from running import JOBS, by_rank, torchmig, unbroken
from running import ForkedRun as Run
from waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

TRAINING = (JOBS / "plain.py", "10000", "0.02")


def inits(folder):
    """Return the pids of the rank-inits inside their namespaces: the children of the outer ones."""
    found = [pid for pid, words in processes(folder).items() if "/rankinit.py" in words]
    return [pid for pid in found if parent(pid) in found]


def training(folder):
    """Return the pids of ranks and of DataLoader workers."""
    ours = [pid for pid, words in processes(folder).items() if f" -u {TRAINING[0]}" in words]
    inside = inits(folder)
    ranks = [pid for pid in ours if parent(pid) in inside]
    return ranks, [pid for pid in ours if parent(pid) in ranks]


def run_marked(folder, *arguments):
    return Run(folder, *arguments, env={MARK: str(folder), "LOADER_WORKERS": "1"})


def start(folder):
    return run_marked(folder, "--nproc-per-node=2", f"--job={job_of(folder)}", *TRAINING)


def criu(folder):
    """Return whether CRIU is at work for the job."""
    return [pid for pid, words in processes(folder).items() if " swrk " in f" {words} "]


MOMENTS = {
    "the first rank-init": lambda run: inits(run.folder),
    "both rank-inits": lambda run: len(inits(run.folder)) == 2,
    "both ranks": lambda run: len(training(run.folder)[0]) == 2,
    "the first step": lambda run: "step 0 " in run.text,
    "training with workers": lambda run: "step 3 " in run.text and training(run.folder)[1],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_agent_is_killed(tmp_path, moment):
    run = start(tmp_path)
    while not MOMENTS[moment](run):
        assert run.process.poll() is None, run.errors
        time.sleep(0.005)
    run.signal(signal.SIGKILL)
    run.process.wait()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("phase", ["cut", "in the dump", "dump", "store"])
def test_the_agent_is_killed_in_a_suspend(tmp_path, phase):
    run = start(tmp_path)
    run.wait_for_step(3).signal(signal.SIGUSR2)
    if phase == "in the dump":
        wait_until(lambda: criu(tmp_path), lambda: "no CRIU")
    else:
        run.wait_for(rf"^torchmig: {phase}: ")
    run.signal(signal.SIGKILL)
    run.process.wait()
    assert_nothing_left(tmp_path)

    if phase != "in the dump":
        return
    # What it leaves in files keeps nobody from starting the job again and suspending it.
    again = start(tmp_path)
    again.wait_for_step(2).suspend()
    assert_nothing_left(tmp_path)
    listed = torchmig("snapshots", "--repo", tmp_path / "torchmig-repo").stdout
    assert len([line for line in listed.splitlines() if "suspend" in line]) == 1


def test_the_agent_is_killed_in_a_restore(tmp_path):
    start(tmp_path).wait_for_step(3).suspend()
    run = run_marked(tmp_path, "--restore=latest")
    wait_until(lambda: criu(tmp_path), lambda: "no CRIU")
    run.signal(signal.SIGKILL)
    run.process.wait()
    assert_nothing_left(tmp_path)

    again = run_marked(tmp_path, "--restore=latest").wait_for(r"^rank 0 step \d+ ")
    again.signal(signal.SIGTERM)
    assert again.wait() == 1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("who", ["rank", "init", "worker"])
def test_one_process_is_killed(tmp_path, who):
    run = start(tmp_path)
    run.wait_for_step(3)
    ranks, workers = wait_until(
        lambda: (found := training(tmp_path)) and len(found[1]) == 2 and found, lambda: run.text
    )
    victim = {"rank": ranks, "init": inits(tmp_path), "worker": workers}[who][0]
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 1
    assert_nothing_left(tmp_path)
    assert "plain.py FAILED" in run.errors
    if who != "worker":
        assert re.search(r"exitcode +: -9 ", run.errors)
        assert "Signal 9 (SIGKILL) received by PID" in run.errors


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_rank_is_killed_in_the_dump(tmp_path, number):
    """As by a host that has no memory left: the job fails soon, and nothing of it is left."""
    work = tmp_path / "w"
    run = run_marked(tmp_path, "--nproc-per-node=2", f"--work-dir={work}", *TRAINING)
    ranks, _ = training(run.wait_for_step(3).folder)
    run.signal(number)
    wait_until(lambda: criu(tmp_path), lambda: "no CRIU")
    os.kill(ranks[0], signal.SIGKILL)
    assert run.wait(45) == 1  # well before a rank that does not answer would be given up
    assert re.search(r"exitcode +: -9 ", run.errors)
    assert run.errors.count("Traceback (most recent call last)") == 1  # torchrun's own
    assert_nothing_left(tmp_path)
    assert list(work.iterdir()) == []


def test_the_outer_init_is_killed(tmp_path):
    """The job does not need it; nothing is left at the end all the same."""
    run = run_marked(tmp_path, "--nproc-per-node=2", JOBS / "ring.py", "40").wait_for_step(3)
    os.kill(parent(inits(tmp_path)[0]), signal.SIGKILL)
    run.finish()
    assert by_rank(run.text) == unbroken(2, "ring.py", "40")
    assert_nothing_left(tmp_path)


def test_a_rank_that_fails_and_one_that_leaves_a_process_behind(tmp_path):
    run = run_marked(tmp_path, "--nproc-per-node=2", JOBS / "report.py", "daemon", "exit=3@1")
    assert run.wait() == 1
    assert_nothing_left(tmp_path)


def test_the_agent_is_told_to_end(tmp_path):
    run = start(tmp_path).wait_for_step(1).signal(signal.SIGTERM)
    assert run.wait() == 1
    assert_nothing_left(tmp_path)


def test_what_a_killed_agent_leaves_in_files_is_removed_by_the_next_one(tmp_path):
    runtime = tmp_path / "r"
    options = (f"--runtime-dir={runtime}", JOBS / "report.py", "wait")
    killed = run_marked(tmp_path, "--job=dead", *options).wait_for("rank 0 waits")
    running = run_marked(tmp_path, "--job=live", *options).wait_for("rank 0 waits")
    killed.signal(signal.SIGKILL)
    killed.process.wait()
    assert (runtime / "dead" / "rank-0" / "stdout").exists()

    third = run_marked(tmp_path, "--job=next", *options).wait_for("rank 0 waits")
    assert sorted(folder.name for folder in runtime.iterdir()) == ["live", "next"]
    assert (runtime / "live" / "rank-0" / "ctl").exists()
    for run in (running, third):
        assert run.signal(signal.SIGTERM).wait() == 1
    assert list(runtime.iterdir()) == []


def test_images_that_a_killed_agent_leaves_are_removed_by_the_next_one(tmp_path):
    work = tmp_path / "w"
    options = (f"--runtime-dir={tmp_path}/r", f"--work-dir={work}")
    run = run_marked(tmp_path, "--nproc-per-node=2", *options, *TRAINING)
    run.wait_for_step(3).signal(signal.SIGUSR2)
    wait_until(lambda: list(work.glob("*/images/pages-*.img")), lambda: run.errors)
    run.signal(signal.SIGKILL)
    run.process.wait()
    assert_nothing_left(tmp_path)
    left = list(work.iterdir())
    assert len(left) == 2

    # What is not an agent's own stays: a link to elsewhere, and another user's.
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "images").mkdir(parents=True)
    link, foreign = (
        left[0].with_name(f"{left[0].name[:-8]}{end}") for end in ("linklink", "elses_00")
    )
    link.symlink_to(elsewhere)
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)

    again = run_marked(tmp_path, *options, JOBS / "report.py", "wait").wait_for("rank 0 waits")
    assert sorted(work.iterdir()) == sorted([link, foreign])
    assert list(elsewhere.iterdir()) == [elsewhere / "images"]
    assert again.signal(signal.SIGTERM).wait() == 1


def test_a_restore_right_after_the_commit(tmp_path):
    """While the agent that has suspended the job is still on its way out."""
    script = (JOBS / "single.py", "60", "inference")
    run = run_marked(tmp_path, f"--job={job_of(tmp_path)}", *script)
    run.wait_for_step(5)
    torchmig("suspend", job_of(tmp_path))
    again = run_marked(tmp_path, "--restore=latest").finish()
    assert run.wait() == 85
    assert by_rank(run.text, again.text) == unbroken(1, "single.py", "60", "inference")
