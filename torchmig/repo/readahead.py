"""Reading a snapshot's packs for the page cache alone, before anybody can use their bytes.

For repositories in folders: what a restore is going to read lies in memory then. Nothing is decoded
or checked, and nothing is kept that the kernel would not give up at once.

As a program it ends with whoever has started it, when its standard input is closed:

    python -m torchmig.repo.readahead ADDRESS SNAPSHOT JOB HOST BYTES
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torchmig.errors import TorchmigError
from torchmig.repo.blob import Kind
from torchmig.repo.manifest import Manifest
from torchmig.repo.plan import Read, plan_reads
from torchmig.repo.repository import Repository

log = logging.getLogger(__name__)

_THREADS = 4  # which keep a disk busy
_READ_BYTES = 4 << 20


def read_ahead(address: str, reference: str, job: str | None, host: str, most_bytes: int) -> None:
    """Read what a host needs of a snapshot; return when all of it has been read.

    Args:
        address: Of a repository in a folder.
        reference: Names the snapshot, as for `Repository.load`.
        job: As there.
        host: Where several had ranks, those of this one are read.
        most_bytes: Where to end if there is more.

    Raises:
        TorchmigError: There is no such snapshot, or it cannot be read.
    """
    with Repository.open(address) as repository:
        manifest = repository.load(reference, job)
        reads = list(_wanted(repository, manifest, host, most_bytes))
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [
                pool.submit(_read, repository, reads[number::_THREADS])
                for number in range(_THREADS)
            ]:
                done.result()


def _wanted(
    repository: Repository, manifest: Manifest, host: str, most_bytes: int
) -> Iterator[Read]:
    """Yield reads in the order in which a restore makes them: processes, then GPU blocks."""
    several = len({rank.node for rank in manifest.ranks}) > 1
    ranks = [rank for rank in manifest.ranks if not several or rank.node == host]
    streams = [stream for rank in ranks for stream in rank.streams]
    index = repository.index()
    with repository.reader(manifest) as reader:
        for stream in sorted(streams, key=lambda each: each.kind == Kind.GPU_BLOCK):
            for read in plan_reads(index, reader.rows(stream), _READ_BYTES):
                most_bytes -= read.size_bytes
                if most_bytes < 0:
                    return
                yield read


def _read(repository: Repository, reads: list[Read]) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    for read in reads:
        for start in range(0, read.size_bytes, _READ_BYTES):
            into = buffer[: min(_READ_BYTES, read.size_bytes - start)]
            repository.store.get_into(read.name, read.offset_bytes + start, into)


def main() -> None:
    """Read what the arguments say."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    address, reference, job, host, most_bytes = sys.argv[1:]
    try:
        read_ahead(address, reference, job or None, host, int(most_bytes))
    except TorchmigError as error:
        log.debug("no more is read ahead: %s", error)  # the restore will say it


def _end_with_starter() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
