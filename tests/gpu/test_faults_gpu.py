"""Whatever fails, with the real driver: the job trains on with the same results, or goes nowhere.

Twenty-five requests to one job each fail at another point; then one works. Five restores find too
little memory on their GPU and say so before anything is started; then one works.
"""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty import mortal_criu, mounted, python_program, remount
from running import Run, by_rank, snapshots, unbroken

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(420)]

HERE = Path(__file__).parent
JOB = HERE / "multi_job.py"
STEPS = "4000"  # as many as are made while the requests fail
KILL_CRIU_AFTER_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.4)
GOES_ON = "withdrawn, the job goes on: "


def test_twenty_five_failed_requests_and_one_that_works(tmp_path, criu):
    fault, after, may_end = (tmp_path / name for name in ("fault", "after", "may-end"))
    program = python_program(tmp_path / "torchmig-run", HERE / "faulty_agent.py")
    environment = {
        "FAULT": str(fault),
        "TORCHMIG_CRIU": str(mortal_criu(tmp_path / "usr", criu, after)),
    }
    with (
        ThreadPoolExecutor() as pool,
        mounted(tmp_path / "disk", "size=8g") as disk,
        mounted(tmp_path / "work", "size=8g") as work,
    ):
        reference = pool.submit(unbroken, 1, str(JOB), "streams", STEPS)
        options = ("--staging=4G", f"--repo={disk}/repo", f"--work-dir={work}")
        run = Run(
            tmp_path,
            "--nproc-per-node=1",
            *options,
            JOB,
            "streams",
            STEPS,
            may_end,
            program=program,
            env=environment,
        )
        run.wait_for_step(10)
        failures = 0

        def fails(reason):
            nonlocal failures
            failures += 1
            number = signal.SIGUSR1 if failures % 2 else signal.SIGUSR2
            before = run.errors.count(GOES_ON)
            run.signal(number).wait_for_count(GOES_ON, before + 1)
            said = run.errors.rsplit(GOES_ON, 1)[-1]
            assert reason in said, said
            step = int(run.text.split()[-2])
            run.wait_for_step(min(step + 2, int(STEPS) - 6))

        for seconds in KILL_CRIU_AFTER_SECONDS:
            for name, reason in (
                ("lock", "the driver cannot lock process"),
                ("checkpoint", "the driver cannot checkpoint process"),
                ("copy", "nobody"),
            ):
                fault.write_text(name)
                fails(reason)
            fault.unlink()
            after.write_text(str(seconds))
            fails("criu dump failed")
            after.write_text("")
            remount(disk, "size=4m")
            fails("no space left")
            remount(disk, "size=8g")
        assert failures == 5 * len(KILL_CRIU_AFTER_SECONDS)
        assert "Traceback" not in run.errors
        assert snapshots(tmp_path, disk / "repo") == []
        run.suspend()
        may_end.touch()
        again = Run(tmp_path, *options, "--restore=latest").finish()
        assert by_rank(run.text, again.text) == reference.result()


HOG = """
import sys, torch
left, piece, hog = int(sys.argv[1]), 1 << 30, []
while piece >= 32 << 20:
    if torch.cuda.mem_get_info()[0] - piece < left:
        piece //= 2
    else:
        hog.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def little_memory(left_bytes):
    """Take a GPU's memory but for so much."""
    command = [sys.executable, "-c", HOG, str(left_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
        assert hog.stdout.readline() == b"taken\n"
        yield
        hog.stdin.close()


def test_five_restores_without_room_and_one_that_works(tmp_path):
    first = Run(tmp_path, "--nproc-per-node=1", "--staging=4G", JOB, "gpt", 40)
    first.wait_for_step(8).suspend()
    for left in (64 << 20, 256 << 20, 512 << 20, 1 << 30, 2 << 30):
        with little_memory(left):
            refused = Run(tmp_path, "--restore=latest", "--staging=4G")
            assert refused.wait() == 21, refused.errors
            assert "are needed; free some, or name other GPUs with --gpus" in refused.errors
    again = Run(tmp_path, "--restore=latest", "--staging=4G").finish()
    assert by_rank(first.text, again.text) == unbroken(1, str(JOB), "gpt", "40")


def test_too_little_staging_is_refused_and_the_job_trains_on(tmp_path):
    run = Run(tmp_path, "--nproc-per-node=1", "--staging=1M", JOB, "streams", 100)
    run.wait_for_step(8).signal(signal.SIGUSR2).wait_for("staging can have 1.000 MiB")
    assert by_rank(run.finish().text) == unbroken(1, str(JOB), "streams", "100")
