"""SIGTERM ends a job as torchrun does, or suspends it where the user wants that."""

import re
import signal

import pytest
from running import JOBS, by_rank, torchmig, unbroken
from running import ForkedRun as Run

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

SUSPEND = "--term-action=suspend"


def test_sigterm_suspends(tmp_path):
    first = Run(tmp_path, SUSPEND, "--nproc-per-node=2", JOBS / "ring.py", "40").wait_for_step(5)
    assert first.signal(signal.SIGTERM).wait() == 85
    second = Run(tmp_path, "--restore=latest").finish()
    assert by_rank(first.text, second.text) == unbroken(2, "ring.py", "40")


def test_what_cannot_be_suspended_ends_as_under_torchrun(tmp_path):
    (tmp_path / "file").touch()
    run = Run(tmp_path, SUSPEND, "--repo=file", JOBS / "report.py", "wait")
    run.wait_for("rank 0 waits").signal(signal.SIGTERM)
    assert run.wait() == 1
    assert "rank 0 got SIGTERM" in run.text
    assert "it is a file, not a folder" in run.errors


def test_a_second_sigterm_does_not_wait(tmp_path):
    """A rank that never comes to the cut: it does not even import torch."""
    run = Run(tmp_path, SUSPEND, "--deadline=600", JOBS / "report.py", "wait")
    run.wait_for("rank 0 waits").signal(signal.SIGTERM).wait_for("^torchmig: preflight")
    run.signal(signal.SIGTERM)
    assert run.wait() == 1
    assert "rank 0 got SIGTERM" in run.text


def test_a_job_in_no_time(tmp_path):
    """The grace is over before the rank can stand at the cut."""
    run = Run(tmp_path, SUSPEND, "--grace=2", JOBS / "report.py", "wait")
    run.wait_for("rank 0 waits").signal(signal.SIGTERM)
    assert run.wait(60) == 1
    assert re.search("^torchmig-run: suspend of job '.*' withdrawn", run.errors, re.MULTILINE)
    listed = torchmig("snapshots", "--json", "--repo", tmp_path / "torchmig-repo", check=False)
    assert listed.stdout.strip() in ("", "[]")
