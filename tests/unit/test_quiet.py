"""Torch's threads come to rest in the eyes of a rank on a machine that has no time for them."""

import contextlib
import os
import subprocess
import sys

from c_library import build

THREADS = """
#include <pthread.h>
#include <time.h>

static void* look_around(void* unused) {
    struct timespec pause = {0, 10 * 1000 * 1000};
    for (;;) nanosleep(&pause, 0);
}

static void* work(void* unused) {
    for (volatile unsigned long turn = 0;; turn++) {}
}

void start(int busy, int count) {
    pthread_t thread;
    while (count--) pthread_create(&thread, 0, busy ? work : look_around, 0);
}
"""

SCRIPT = """
import ctypes, os, sys, time
import torch
from torchmig import _C

threads = ctypes.CDLL(sys.argv[1])
before = _C.ProcessView.now()
threads.start(0, 100)
_C.remember_torch(before, _C.ProcessView.now())
begun = time.monotonic()
while moves := _C.what_moves():
    if time.monotonic() > begun + 20:
        sys.exit(f"threads that only look around are taken for busy ones: {moves}")

before = _C.ProcessView.now()
threads.start(1, 1)
_C.remember_torch(before, _C.ProcessView.now())
for _ in range(20):
    if "is not asleep (R)" not in _C.what_moves():
        sys.exit("a thread that works is taken for one that sleeps")
"""


def test_threads_that_look_around_sleep_and_those_that_work_do_not(tmp_path):
    library = build(tmp_path / "threads.so", THREADS, "-lpthread")
    with contextlib.ExitStack() as busy:
        for _ in range(3 * len(os.sched_getaffinity(0))):
            hog = busy.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            busy.callback(hog.kill)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, library], capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
