"""Suspends and restores one GPU process without an agent: the same steps, one after the other."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from torchmig.capture.device import driver
from torchmig.capture.device.environment import rank_environment
from torchmig.capture.device.staging import Staging
from torchmig.capture.device.windows import Block, windows
from torchmig.criu import find_criu

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("gpu_job.py")
ASK_SECONDS = 240.0
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper():
    """A restored process is nobody's child: without this its pid would stay taken when it ends."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def job_environment(arena=True, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment.update(more)
    if arena:
        environment.update(rank_environment(environment))
    return environment


class Job:
    """A running job of `gpu_job.py`, alone in its session."""

    def __init__(self, kind, steps, folder, environment, stop=None):
        self.folder = folder
        self.times = {}
        self.sizes = {}
        self.number = 0
        become_subreaper()
        folder.mkdir(parents=True)
        if stop is not None:
            self.park_after(stop)
        with (folder / "out").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(JOB), kind, str(steps), str(folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = process.pid
        process.returncode = 0  # waited for here, not by subprocess
        self.status = None

    @contextmanager
    def timed(self, name):
        begun = time.monotonic()
        yield
        self.times[name] = time.monotonic() - begun

    def alive(self):
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if done else None
        return self.status is None

    def wait(self, seconds=ASK_SECONDS):
        """Wait until the process has ended, and return how."""
        end = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < end, self.output()
            time.sleep(0.001)
        return self.status

    def wait_for(self, name, seconds=ASK_SECONDS):
        path = self.folder / name
        end = time.monotonic() + seconds
        while not path.exists():
            if not self.alive() and not path.exists():
                raise AssertionError(f"the job has ended: {self.output()}")
            if time.monotonic() > end:
                raise AssertionError(f"no '{name}' from the job: {self.output()}")
            time.sleep(0.001)
        return json.loads(path.read_text())

    def output(self):
        return (self.folder / "out").read_text(errors="replace")[-3000:]

    def park_after(self, step):
        """Say after which step the job is to stand still; before that step, or while it stands."""
        part = self.folder / ".park"
        part.write_text(str(step))
        part.rename(self.folder / "park")

    def wait_parked(self):
        self.wait_for("parked")

    def ask(self, name, **args):
        part = self.folder / ".ask"
        part.write_text(json.dumps({"name": name, "args": args}))
        part.rename(self.folder / f"ask.{self.number}")
        answer = self.wait_for(f"answer.{self.number}")
        self.number += 1
        return answer

    def go(self, next_stop=None):
        (self.folder / "parked").unlink()
        if next_stop is None:
            (self.folder / "park").unlink()
        else:
            self.park_after(next_stop)
        self.ask("go")

    def end(self):
        """Wait for the job's own end and return its log."""
        assert self.wait() == 0, self.output()
        return (self.folder / "log").read_text()

    def kill(self):
        if self.alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def criu(action, images, *options):
    log = f"{action}.log"
    tool = find_criu(os.environ.get("TORCHMIG_CRIU"))
    command = [str(tool.path), action, "-D", str(images), "-o", log, "-v1", *options]
    command += ["--manage-cgroups=ignore", "--link-remap", "--ghost-limit", "1G", "--file-locks"]
    done = subprocess.run(command, check=False, capture_output=True)
    if done.returncode != 0:
        text = (images / log).read_text(errors="replace")
        raise AssertionError(f"criu {action} failed: {text[-2000:]}")


def tree_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())


def take_out(job, images, staging, socket_path):
    """The arena's way: live blocks to staging, memory given back, then driver and CRIU."""
    with job.timed("release_total"):
        with job.timed("live"):
            blocks = [Block(*block) for block in job.ask("live")]
        (pieces,) = windows(blocks, staging.size_bytes) if blocks else ([],)
        flat = [
            (
                blocks[p.block].device,
                blocks[p.block].address + p.block_offset,
                p.size_bytes,
                p.offset,
            )
            for p in pieces
        ]
        with job.timed("copy_out"), staging.offered(socket_path) as path:
            job.ask("copy", out=True, staging=path, pieces=flat)
        with job.timed("leave"):
            job.sizes.update(job.ask("leave"))
        dump(job, images)
    job.sizes["live"] = sum(block.size_bytes for block in blocks)
    job.sizes["blocks"] = len(blocks)
    return flat


def place(block, piece):
    address = block.address + piece.block_offset
    return block.device, address, piece.size_bytes, piece.offset


def bring_back(job, images, staging, socket_path, flat, gpus=None):
    with job.timed("resume_total"):
        undump(job, images, gpus)
        with job.timed("regain"):
            job.ask("come_back")
        with job.timed("copy_in"), staging.offered(socket_path) as path:
            job.ask("copy", out=False, staging=path, pieces=flat)


def dump(job, images):
    """The driver's checkpoint and CRIU's dump; the process is gone afterwards."""
    images.mkdir(parents=True)
    with job.timed("driver_checkpoint"):
        driver.suspend_all([job.pid])
    with job.timed("criu_dump"):
        criu("dump", images, "-t", str(job.pid))
    assert os.WTERMSIG(job.wait()) == signal.SIGKILL
    reap_orphans()
    job.sizes["image"] = tree_bytes(images)


def reap_orphans():
    """Take the ends of the job's own children, whose pids are wanted again."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def undump(job, images, gpus=None):
    with job.timed("criu_restore"):
        criu("restore", images, "-d")
        job.status = None
    with job.timed("driver_restore"):
        driver.resume_all([job.pid], {job.pid: gpus} if gpus else None)


def new_staging(size_bytes):
    staging = Staging(size_bytes)
    staging.touch(size_bytes, threads=os.cpu_count() or 2)
    staging.wait_touched()
    return staging


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)
