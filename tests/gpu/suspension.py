"""Suspends and restores one GPU process without an agent: the same steps, one after the other."""

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


def job_environment(arena=True, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment.update(more)
    if arena:
        environment.update(rank_environment(environment))
    return environment


class Job:
    """A running job of `gpu_job.py`, alone in its session."""

    def __init__(self, kind, steps, folder, environment):
        self.folder = folder
        self.times = {}
        self.sizes = {}
        self.number = 0
        folder.mkdir(parents=True)
        with (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), kind, str(steps), str(folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @contextmanager
    def timed(self, name):
        begun = time.monotonic()
        yield
        self.times[name] = time.monotonic() - begun

    def alive(self):
        if self.process is not None:
            return self.process.poll() is None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(") ", 1)[1][0]
        except FileNotFoundError:
            return False
        return state != "Z"

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

    def wait_for_steps(self, steps, seconds=ASK_SECONDS):
        end = time.monotonic() + seconds
        log = self.folder / "log"
        while not log.exists() or len(log.read_text().splitlines()) < steps:
            if not self.alive():
                raise AssertionError(f"the job has ended: {self.output()}")
            if time.monotonic() > end:
                raise AssertionError(f"no step {steps} from the job: {self.output()}")
            time.sleep(0.005)

    def output(self):
        return (self.folder / "out").read_text(errors="replace")[-3000:]

    def park(self):
        (self.folder / "parked").unlink(missing_ok=True)
        (self.folder / "park").touch()
        self.wait_for("parked")

    def ask(self, name, **args):
        part = self.folder / ".ask"
        part.write_text(json.dumps({"name": name, "args": args}))
        part.rename(self.folder / f"ask.{self.number}")
        answer = self.wait_for(f"answer.{self.number}")
        self.number += 1
        return answer

    def go(self):
        (self.folder / "park").unlink()
        self.ask("go")

    def end(self):
        """Wait for the job's own end and return its log."""
        if self.process is not None:
            assert self.process.wait(ASK_SECONDS) == 0, self.output()
        else:
            end = time.monotonic() + ASK_SECONDS
            while self.alive():
                assert time.monotonic() < end, self.output()
                time.sleep(0.005)
        return (self.folder / "log").read_text()

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


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
    if job.process is not None:
        job.process.wait()
        job.process = None
    job.sizes["image"] = tree_bytes(images)


def undump(job, images, gpus=None):
    with job.timed("criu_restore"):
        criu("restore", images, "-d")
    with job.timed("driver_restore"):
        driver.resume_all([job.pid], gpus)


def new_staging(size_bytes):
    staging = Staging(size_bytes)
    staging.touch(size_bytes, threads=os.cpu_count() or 2)
    staging.wait_touched()
    return staging


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)
