"""For tests that run jobs: none is left behind, and workers share what torchrun prints."""

import os

import pytest
import running


@pytest.fixture(scope="session", autouse=True)
def _shared_references(tmp_path_factory):
    if "PYTEST_XDIST_WORKER" in os.environ:
        running.references = tmp_path_factory.getbasetemp().parent / "references"


@pytest.fixture(autouse=True)
def _no_job_is_left():
    yield
    while running.started:
        running.started.pop().kill()
