import contextlib
import io
import json
import os
import pty
import threading

import pytest

from torchmig.progress import make_progress


def test_log_gets_one_line_a_phase():
    stream = io.StringIO()
    with make_progress(False, False, stream).phase("capture", 100) as phase:
        phase.advance(60)
        phase.advance(40)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("torchmig: capture: 100 B in 0.0")


def test_failed_phase_says_so_and_the_error_goes_on():
    stream = io.StringIO()
    with pytest.raises(OSError, match="disk"), make_progress(False, False, stream).phase("dump"):
        raise OSError("disk")
    assert "torchmig: dump: failed in 0.0" in stream.getvalue()


def test_json_has_begin_and_end_with_raw_numbers():
    stream = io.StringIO()
    with make_progress(True, False, stream).phase("capture", 100) as phase:
        phase.advance(100)
    begun, done = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (begun["message_type"], begun["phase"], begun["state"]) == ("status", "capture", "begun")
    assert (done["state"], done["bytes"], done["total_bytes"]) == ("done", 100, 100)
    assert 0 <= done["seconds"] < 60


def test_quiet_says_nothing():
    stream = io.StringIO()
    with make_progress(True, True, stream).phase("capture"):
        pass
    assert stream.getvalue() == ""


def test_bytes_of_many_threads_are_all_counted():
    with make_progress(False, False, io.StringIO()).phase("capture") as phase:
        threads = [
            threading.Thread(target=lambda: [phase.advance(1) for _ in range(1000)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert phase.done_bytes == 8000


def test_terminal_gets_its_cursor_back_and_a_line_a_phase(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        progress = make_progress(False, False, stream)
        with progress.phase("capture", 10) as phase:
            phase.advance(10)
        with progress.phase("commit"):
            pass
    text = b""
    with contextlib.suppress(OSError):  # how a terminal ends that nobody writes to any more
        while chunk := os.read(leader, 1 << 16):
            text += chunk
    text = text.decode()
    os.close(leader)
    assert "10 B in" in text
    assert "commit" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
