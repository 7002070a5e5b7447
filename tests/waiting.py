"""Waits for what other processes and threads do."""

import time


def wait_until(holds, say=lambda: "it does not come true", seconds=60):
    """Return what `holds` returns as soon as that is true; fail with what `say` returns."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, say()
        time.sleep(0.01)
    return found
