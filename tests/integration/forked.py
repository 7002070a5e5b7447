"""Launchers that need not load torch again: forked from one process that has loaded it.

For torchrun where it is only compared with, and for tests with many starts, of which loading torch
is much of the work. All else is as when a shell starts them: the program itself, its arguments,
environment, folder, session, streams, signals and exit code.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed.run"])


def launch(command, folder, environment, *streams):
    """Become the program, which is a file of Python."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((os.devnull, *streams)):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


class Forked:
    """A launcher, with the methods of subprocess.Popen that Run uses."""

    def __init__(self, command, *, stdout, stderr, cwd, env, **_as_run_wants_it):
        streams = (stdout.name, stderr.name)
        self._process = context.Process(target=launch, args=(command, cwd, env, *streams))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, seconds=None):
        self._process.join(seconds)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a launcher", seconds)
        return self.poll()

    def send_signal(self, number):
        os.kill(self.pid, number)
