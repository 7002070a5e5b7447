"""torchmig-run whose calls of the real driver fail where a file says so.

FAULT names the file. In it: lock (the driver is asked to lock what is locked already), checkpoint
(to checkpoint what is not locked), copy (staging is gone when the copy begins), or nothing.
"""

import os
import sys
from pathlib import Path

from torchmig.agent.main import main
from torchmig.capture.device import driver
from torchmig.capture.device.staging import Staging

FAULT = Path(os.environ["FAULT"])


def asked_for(name):
    return FAULT.exists() and FAULT.read_text() == name


def lock(pid, timeout_seconds=driver.LOCK_TIMEOUT_SECONDS, original=driver.lock):
    original(pid, timeout_seconds)
    if asked_for("lock"):
        original(pid, timeout_seconds)


def checkpoint(pid, original=driver.checkpoint):
    if asked_for("checkpoint"):
        driver.unlock(pid)
    original(pid)


def offered(staging, path, original=Staging.offered):
    return original(staging, path.with_name("nobody") / "staging" if asked_for("copy") else path)


driver.lock, driver.checkpoint, Staging.offered = lock, checkpoint, offered

sys.exit(main())
