"""Snapshots of jobs, kept as deduplicated, checked blobs in a store."""

from torchmig.repo.advance import Advance, InSteps, unheard
from torchmig.repo.blob import Kind
from torchmig.repo.depot import Depot
from torchmig.repo.extents import Extent
from torchmig.repo.manifest import JobName, Manifest, RankSection, Stream, target_path
from torchmig.repo.memory import MappedFile
from torchmig.repo.reader import Mapping, Reader
from torchmig.repo.repository import Repository, Summary
from torchmig.repo.stream import StreamWriter
from torchmig.repo.writer import Writer, WriterStats

__all__ = [
    "Advance",
    "Depot",
    "Extent",
    "InSteps",
    "JobName",
    "Kind",
    "Manifest",
    "MappedFile",
    "Mapping",
    "RankSection",
    "Reader",
    "Repository",
    "Stream",
    "StreamWriter",
    "Summary",
    "Writer",
    "WriterStats",
    "target_path",
    "unheard",
]
