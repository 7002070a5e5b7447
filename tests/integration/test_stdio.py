"""What ranks print comes out once, in order, byte for byte, whatever it is."""

import os
import signal
import subprocess

import pytest
from running import BIN, JOBS, Run, by_rank
from waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.timeout(180)]

PRINTING = JOBS / "printing.py"
MIB = 1 << 20


def test_many_lines_of_two_ranks(tmp_path):
    count = 20_000
    run = Run(tmp_path, "--nproc-per-node=2", PRINTING, "lines", count).finish()
    for rank, found in by_rank(run.text).items():
        assert found == [f"rank {rank} line {number}" for number in range(count)]
    for rank, found in by_rank(run.errors).items():
        assert found == [f"rank {rank} error {number}" for number in range(0, count, 10)]


def test_lines_with_prefixes(tmp_path):
    count = 2000
    run = Run(tmp_path, "--nproc-per-node=2", "--tee=3", PRINTING, "lines", count).finish()
    for rank in range(2):
        found = [line for line in run.text.splitlines() if line.startswith(f"[default{rank}]:")]
        assert found == [f"[default{rank}]:rank {rank} line {number}" for number in range(count)]


def test_parts_of_lines_are_seen_while_the_rank_waits(tmp_path):
    run = Run(tmp_path, PRINTING, "parts", tmp_path / "go")
    wait_until(lambda: run.stdout.read_bytes() == b"Continue? ", seconds=60)
    (tmp_path / "go").touch()
    run.finish()
    bar = b"".join(b"\r%3d %%" % percent for percent in range(0, 101, 10))
    assert run.stdout.read_bytes() == b"Continue? yes\n" + bar


def test_bytes_that_are_no_text(tmp_path):
    run = Run(tmp_path, PRINTING, "binary").finish()
    assert run.stdout.read_bytes() == bytes(range(256)) * 100
    assert run.stderr.read_bytes() == b"\xff\xfe no text \0 \n"


def test_what_has_been_passed_on_takes_no_memory(tmp_path):
    """The files lie in the runtime folder, which is often in memory."""
    runtime = tmp_path / "r"
    run = Run(
        tmp_path, f"--runtime-dir={runtime}", "--job=j", PRINTING, "bulk", 16, tmp_path / "go"
    )
    wait_until(lambda: run.stdout.stat().st_size == 16 * MIB, seconds=60)
    status = (runtime / "j" / "rank-0" / "stdout").stat()
    assert status.st_size == 16 * MIB
    assert status.st_blocks * 512 <= 3 * MIB
    (tmp_path / "go").touch()
    text = run.finish().text
    assert text == "".join(f"{number:1023}\n" for number in range(16 * 1024))


def test_a_reader_that_has_gone_does_not_end_the_job(tmp_path):
    count, done = 50_000, tmp_path / "go"
    process = subprocess.Popen(
        [str(BIN / "torchmig-run"), str(PRINTING), "many", str(count), str(done)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        process.stdout.close()
        done.touch()
        errors = process.stderr.read().decode()
        process.stderr.close()
        assert process.wait(60) == 0, errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    sentences = [line for line in errors.splitlines() if not line.startswith("rank 0 error ")]
    assert sentences == [
        "torchmig-run: cannot write to standard output any more: [Errno 32] Broken pipe; "
        "the job goes on"
    ]
