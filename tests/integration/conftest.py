"""No test leaves a job behind, whatever became of it."""

import pytest
import running


@pytest.fixture(autouse=True)
def _no_job_is_left():
    yield
    while running.started:
        running.started.pop().kill()
