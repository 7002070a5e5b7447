"""What these tests share with the ones that need no GPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from job_fixtures import _no_job_is_left, _shared_references

__all__ = ["_no_job_is_left", "_shared_references"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    # Bit-identical results ask for it.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As --standalone: until torch 2.12 all jobs of a host met at one port without it.
    monkeypatch.setenv("PET_STANDALONE", "1")
