"""Reading a snapshot's packs for the page cache alone, before anybody can use their bytes.

For repositories in folders: what a restore is going to read lies in memory then. Nothing is decoded
or checked, and nothing is kept that the kernel would not give up at once.
"""

import logging
import threading
from collections.abc import Iterator

from torchmig.errors import TorchmigError
from torchmig.repo.blob import Kind
from torchmig.repo.manifest import Manifest
from torchmig.repo.plan import Read, plan_reads
from torchmig.repo.repository import Repository

log = logging.getLogger(__name__)

_THREADS = 4  # which keep a disk busy
_READ_BYTES = 4 << 20


class ReadAhead(threading.Thread):
    """Reads in the background. What goes wrong is for whoever needs the bytes to say."""

    def __init__(self, address: str, reference: str, job: str | None, most_bytes: int) -> None:
        """Prepare; `start` begins to read.

        Args:
            address: Of a repository in a folder.
            reference: Names the snapshot, as for `Repository.load`.
            job: As there.
            most_bytes: Where to end if the snapshot has more.
        """
        super().__init__(name="read-ahead", daemon=True)
        self._address = address
        self._reference = reference
        self._job = job
        self._most_bytes = most_bytes

    def run(self) -> None:
        """Read until the end."""
        try:
            with Repository.open(self._address) as repository:
                manifest = repository.load(self._reference, self._job)
                reads = list(self._wanted(repository, manifest))
                threads = [
                    threading.Thread(
                        target=_read, args=(repository, reads[number::_THREADS]), daemon=True
                    )
                    for number in range(_THREADS)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        except (TorchmigError, OSError) as error:
            log.debug("nothing is read ahead: %s", error)

    def _wanted(self, repository: Repository, manifest: Manifest) -> Iterator[Read]:
        """Yield reads in the order in which a restore makes them: processes, then GPU blocks."""
        index = repository.index()
        left = self._most_bytes
        with repository.reader(manifest) as reader:
            for stream in sorted(manifest.streams, key=lambda each: each.kind == Kind.GPU_BLOCK):
                for read in plan_reads(index, reader.rows(stream), _READ_BYTES):
                    left -= read.size_bytes
                    if left < 0:
                        return
                    yield read


def _read(repository: Repository, reads: list[Read]) -> None:
    buffer = bytearray(_READ_BYTES)
    try:
        for read in reads:
            for start in range(0, read.size_bytes, _READ_BYTES):
                size = min(_READ_BYTES, read.size_bytes - start)
                into = memoryview(buffer)[:size]
                repository.store.get_into(read.name, read.offset_bytes + start, into)
    except (TorchmigError, OSError) as error:
        log.debug("no more is read ahead: %s", error)
