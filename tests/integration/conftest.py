"""What these tests share."""

from job_fixtures import _no_job_is_left, _shared_references

__all__ = ["_no_job_is_left", "_shared_references"]
