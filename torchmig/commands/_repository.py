"""What the verbs over a repository share: opening it, choosing snapshots, forms of output."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchmig.errors import SnapshotNotFoundError
from torchmig.repo import Repository, Summary


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Repository]:
    """Open the repository that the options name, for the time of the `with` block."""
    with Repository.open(options.repo) as repo:
        yield repo


def add_snapshot(parser: argparse.ArgumentParser, name: str = "snapshot") -> None:
    """Add the argument for one snapshot and the job that "latest" is taken from."""
    parser.add_argument(
        name,
        nargs="?",
        default="latest",
        metavar="ID",
        help="id of a snapshot, a unique beginning of one, or 'latest' (the default)",
    )
    add_job(parser)


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the argument that narrows the choice to one job."""
    parser.add_argument("--job", metavar="NAME", help="only snapshots of this job (name or id)")


def summary_document(summary: Summary) -> dict[str, Any]:
    """Return the JSON form of a snapshot in a list."""
    return {
        "id": summary.id,
        "short_id": summary.id[:8],
        "job": {"name": summary.job.name, "id": summary.job.id},
        "kind": summary.kind,
        "created": summary.created,
        "hosts": summary.node_names,
        "world_size": summary.world_size,
        "size_bytes": summary.size_bytes,
        "tags": summary.tags,
    }


def when(created: str) -> str:
    """Return a manifest's time for people."""
    return created[:19].replace("T", " ")


def chosen(repo: Repository, references: list[str], job: str | None) -> list[Summary]:
    """Return the snapshots named, or all of the job, the oldest first.

    Raises:
        SnapshotNotFoundError: A reference names none or several.
    """
    summaries = repo.snapshots(job)
    if not references:
        return summaries
    by_id = {summary.id: summary for summary in repo.snapshots()}
    ids = {repo.resolve(reference, job) for reference in references}
    unreadable = ids - by_id.keys()
    if unreadable:
        raise SnapshotNotFoundError(
            f"snapshot {min(unreadable)[:8]!r} cannot be read; run 'torchmig check'"
        )
    return [summary for summary in by_id.values() if summary.id in ids]


def printable(text: str) -> str:
    """Return text that any terminal takes, whatever a job's files are called."""
    return text.encode("utf-8", "backslashreplace").decode()


def jsonable(value: Any) -> Any:
    """Return a manifest's free-form data as JSON can hold it; bytes become hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {str(jsonable(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value
