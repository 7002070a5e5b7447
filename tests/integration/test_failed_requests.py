"""A checkpoint that fails, at any phase, leaves the job training, with the same results."""

import os
import signal
import subprocess
from contextlib import contextmanager

import pytest
from running import JOBS, Run, by_rank, snapshots, unbroken

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

JOB = ("ddp.py", "60", "0.05")


@contextmanager
def mounted(folder, options):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fails_and_trains_on(folder, reason, *options, number=signal.SIGUSR2, env=None):
    run = Run(folder, "--nproc-per-node=2", *options, JOBS / JOB[0], *JOB[1:], env=env)
    run.wait_for_step(4).signal(number)
    run.wait_for(rf"torchmig-run: .* withdrawn, the job goes on: .*{reason}").finish()
    assert by_rank(run.text) == unbroken(2, *JOB)
    assert "Traceback" not in run.errors
    return run


def test_repository_that_is_full(tmp_path):
    with mounted(tmp_path / "small", "size=4m") as small:
        fails_and_trains_on(tmp_path, "no space left", f"--repo={small}/repo")
        assert snapshots(tmp_path, small / "repo") == []


def test_repository_that_is_read_only(tmp_path):
    with mounted(tmp_path / "fixed", "ro") as fixed:
        fails_and_trains_on(tmp_path, "[Rr]ead-only", f"--repo={fixed}/repo")


def test_repository_that_is_a_file(tmp_path):
    (tmp_path / "repo").write_text("not a folder")
    fails_and_trains_on(tmp_path, "repo", "--repo=repo", number=signal.SIGUSR1)


def test_no_room_for_images(tmp_path):
    with mounted(tmp_path / "small", "size=4m") as small:
        fails_and_trains_on(tmp_path, "make room or set '--work-dir'", f"--work-dir={small}")
        assert list(small.iterdir()) == []


def test_criu_that_is_missing(tmp_path):
    run = fails_and_trains_on(tmp_path, "cannot use CRIU", env={"TORCHMIG_CRIU": "/none/criu"})
    assert run.errors.count("this job cannot be checkpointed") == 1


def test_criu_that_is_killed_in_the_middle(tmp_path, criu):
    # Same release, same pycriu, but whoever starts it for a dump gets it killed on the way.
    prefix = tmp_path / "usr"
    (prefix / "sbin").mkdir(parents=True)
    (prefix / "lib/python3").mkdir(parents=True)
    (prefix / "lib/python3/dist-packages").symlink_to(criu.pycriu_folder.parent)
    program = prefix / "sbin/criu"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = swrk ] || exec {criu.path} "$@"\n'
        f'exec timeout --foreground -s KILL 0.08 {criu.path} "$@"\n'
    )
    program.chmod(0o755)
    fails_and_trains_on(tmp_path, "criu dump failed", env={"TORCHMIG_CRIU": str(program)})
    assert snapshots(tmp_path) == []


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        ("io_uring", "io_uring, which CRIU cannot dump"),
        ("tcp", "TCP connection to 127.0.0.1:"),
        ("backend", r"it calls a Backend object by itself \(allreduce\)"),
    ],
)
def test_a_rank_that_holds_what_cannot_be_dumped(tmp_path, hold, reason):
    run = Run(tmp_path, "--nproc-per-node=2", JOBS / "holding.py", hold, "60")
    run.wait_for("rank 0 step 4 ").signal(signal.SIGUSR2)
    run.wait_for(rf"suspend of job .* withdrawn, the job goes on: .*rank 1: .*{reason}").finish()
    assert "Traceback" not in run.errors
    assert by_rank(run.text) == unbroken(2, "holding.py", hold, "60")
    assert snapshots(tmp_path) == []


def test_after_a_failure_the_next_request_works(tmp_path):
    with mounted(tmp_path / "small", "size=4m") as small:
        script = (JOBS / JOB[0], *JOB[1:])
        run = Run(tmp_path, "--nproc-per-node=2", f"--repo={small}/repo", *script)
        run.wait_for_step(4).signal(signal.SIGUSR2).wait_for("no space left")
        subprocess.run(["mount", "-o", "remount,size=2g", small], check=True)
        run.suspend()
        again = Run(tmp_path, f"--repo={small}/repo", "--restore=latest").finish()
        assert by_rank(run.text, again.text) == unbroken(2, *JOB)


def test_what_is_half_written_is_not_listed(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=2", JOBS / JOB[0], *JOB[1:])
    run.wait_for_step(4).signal(signal.SIGUSR2).wait_for("torchmig: dump: in")
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    assert snapshots(tmp_path) == []
