"""Waits for what other processes and threads do."""

import time

SECONDS = 15  # much, for a busy machine


def wait_until(holds, say=lambda: "it does not come true", seconds=SECONDS):
    """Return what `holds` returns as soon as that is true; fail with what `say` returns."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, say()
        time.sleep(0.01)
    return found
