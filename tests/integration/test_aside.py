"""Images that are stored and brought back by processes beside the agent, and what may end those."""

import os
import signal
from pathlib import Path

import pytest
from faulty import mounted, python_program, remount
from job_processes import assert_nothing_left, processes
from running import JOBS, Run, by_rank, snapshots, unbroken
from waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

JOB = ("ddp.py", "60", "0.05")


class Jobs:
    """Starts a job in a folder, with `aside_agent.py` in the place of torchmig-run."""

    def __init__(self, folder):
        self.folder = folder
        self.fault = folder / "fault"
        self.may_end = folder / "may-end"
        agent = Path(__file__).with_name("aside_agent.py")
        self.program = python_program(folder / "torchmig-run", agent)

    def start(self, *options):
        env = {"FAULT": str(self.fault)}
        return Run(self.folder, *options, program=self.program, env=env)

    def begin(self, *options):
        job = (JOBS / JOB[0], *JOB[1:], self.may_end)
        return self.start("--nproc-per-node=2", *options, *job).wait_for_step(4)


def test_one_failure_after_the_other_and_then_it_works(tmp_path):
    jobs = Jobs(tmp_path)
    with mounted(tmp_path / "disk", "size=4m") as disk:
        repo = f"--repo={disk}/repo"
        run = jobs.begin(repo)

        def fails(reason):
            run.signal(signal.SIGUSR1)
            run.wait_for(rf"torchmig-run: .* withdrawn, the job goes on: .*{reason}")

        fails("no space left")
        remount(disk, "size=2g")
        jobs.fault.write_text("kill")
        fails("the process that had to do with the images in '.*' has ended with -9")
        jobs.fault.unlink()
        assert snapshots(tmp_path, disk / "repo") == []
        run.suspend()
        assert "Traceback" not in run.errors

        jobs.fault.write_text("kill")
        killed = jobs.start(repo, "--restore=latest")
        assert killed.wait() == 1
        assert "has ended with -9" in killed.errors
        jobs.fault.unlink()
        pack = max((disk / "repo/data").glob("*/*"), key=lambda path: path.stat().st_size)
        whole = pack.read_bytes()
        middle = len(whole) // 2
        pack.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        damaged = jobs.start(repo, "--restore=latest")
        assert damaged.wait() == 22
        assert "is damaged: blob" in damaged.errors
        pack.write_bytes(whole)
        jobs.may_end.touch()
        again = jobs.start(repo, "--restore=latest").finish()
        assert by_rank(run.text, again.text) == unbroken(2, *JOB)


def test_none_outlives_its_agent(tmp_path):
    jobs = Jobs(tmp_path)
    jobs.fault.write_text("stop")
    run = jobs.begin("--work-dir=work").signal(signal.SIGUSR2)

    def beside():
        return [pid for pid, words in processes(tmp_path).items() if "process.aside" in words]

    wait_until(lambda: len(beside()) == 2, lambda: str(processes(tmp_path)))
    stopped = beside()
    run.kill()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert_nothing_left(tmp_path)
