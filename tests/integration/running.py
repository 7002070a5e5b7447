"""Runs real jobs under torchrun and torchmig-run for the tests, and compares what they print."""

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from forked import Forked

JOBS = Path(__file__).resolve().parents[1] / "jobs"
BIN = Path(sys.executable).parent
START_SECONDS = 120
END_SECONDS = 240


started = []  # for the fixture that leaves nothing behind
references = None  # folder of what torchrun's ranks print, where several workers share it


class Run:
    """One start of torchmig-run (or torchrun); its output goes into files."""

    start = subprocess.Popen

    def __init__(self, folder, *arguments, program="torchmig-run", env=None, name=None):
        self.folder = Path(folder)
        name = name or uuid.uuid4().hex[:8]
        self.stdout = self.folder / f"{name}.out"
        self.stderr = self.folder / f"{name}.err"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = self.start(
                [str(BIN / program), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        started.append(self)

    @property
    def text(self):
        return self.stdout.read_text()

    @property
    def errors(self):
        return self.stderr.read_text()

    def wait_for(self, pattern, seconds=START_SECONDS):
        """Wait until a line of standard output or error matches."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text + self.errors, re.MULTILINE):
            code = self.process.poll()
            assert code is None, f"ended with {code} before {pattern!r}:\n{self.text}{self.errors}"
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.text}{self.errors}"
            time.sleep(0.01)
        return self

    def wait_for_count(self, text, count, seconds=START_SECONDS):
        """Wait until standard error has a text so often."""
        deadline = time.monotonic() + seconds
        while self.errors.count(text) < count:
            assert self.process.poll() is None, f"ended before:\n{self.text}{self.errors}"
            assert time.monotonic() < deadline, f"not {count} {text!r} in\n{self.errors}"
            time.sleep(0.01)
        return self

    def wait_for_step(self, step, seconds=START_SECONDS):
        return self.wait_for(rf"^rank \d+ step {step} ", seconds)

    def signal(self, number):
        self.process.send_signal(number)
        return self

    def wait(self, seconds=END_SECONDS):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.text}{self.errors}") from None
        finally:
            self.kill()

    def suspend(self):
        """Suspend and check that it worked."""
        code = self.signal(signal.SIGUSR2).wait()
        assert code == 85, f"ended with {code}:\n{self.text}{self.errors}"
        return self

    def finish(self):
        code = self.wait()
        assert code == 0, f"ended with {code}:\n{self.text}{self.errors}"
        return self

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class ForkedRun(Run):
    """A start that does not load torch anew for the launcher."""

    start = Forked


def torchmig(*arguments, check=True, env=None):
    """Run a verb and return the finished process."""
    done = subprocess.run(
        [str(BIN / "torchmig"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def snapshots(folder, repo=None):
    """Return the snapshots of the repository of a run in `folder`, the newest last."""
    repo = repo or folder / "torchmig-repo"
    return json.loads(torchmig("snapshots", "--json", "--repo", repo).stdout)


def by_rank(*texts):
    """Return the lines of each rank in order; a line belongs to the rank that it begins with."""
    lines = {}
    for line in "".join(texts).splitlines():
        match = re.match(r"rank (\d+) ", line)
        assert match, f"a line of no rank: {line!r}"
        lines.setdefault(int(match[1]), []).append(line)
    return lines


@functools.cache
def unbroken(ranks, script, *arguments):
    """Return what torchrun's ranks print, each into a file of its own; run once a session."""
    if references is None:
        return _unbroken(ranks, script, *arguments)
    name = hashlib.sha256(repr((ranks, script, arguments)).encode()).hexdigest()[:16]
    references.mkdir(exist_ok=True)
    with (references / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = references / f"{name}.json"
        if not kept.exists():
            kept.write_text(json.dumps(_unbroken(ranks, script, *arguments)))
        return {int(rank): lines for rank, lines in json.loads(kept.read_text()).items()}


def _unbroken(ranks, script, *arguments):
    folder = Path(tempfile.mkdtemp(prefix="torchmig-reference-"))
    try:
        run = ForkedRun(
            folder,
            f"--nproc-per-node={ranks}",
            f"--log-dir={folder}/logs",
            "--redirects=1",
            JOBS / script,
            *arguments,
            program="torchrun",
        ).finish()
        assert run.text == ""
        return by_rank(*(path.read_text() for path in folder.glob("logs/*/*/*/stdout.log")))
    finally:
        shutil.rmtree(folder)
