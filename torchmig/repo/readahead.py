"""Reading streams' packs for the page cache alone, before anybody can use their bytes.

Nothing is decoded or checked, and nothing is kept that the kernel would not give up at once.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torchmig.repo.manifest import Stream
from torchmig.repo.plan import Read, plan_reads
from torchmig.repo.repository import Repository

_THREADS = 4  # which keep a disk busy
_READ_BYTES = 4 << 20


def read_ahead(repository: Repository, streams: Iterable[Stream], most_bytes: int) -> None:
    """Read what streams consist of; return when all of it has been read.

    Args:
        repository: In a folder.
        streams: In the order in which they will be wanted.
        most_bytes: Where to end if there is more.

    Raises:
        TorchmigError: Something is not there, or cannot be read.
    """
    reads = list(_wanted(repository, streams, most_bytes))
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [reads[number::_THREADS] for number in range(_THREADS)]
        for done in [pool.submit(_read, repository, part) for part in parts]:
            done.result()


def _wanted(repository: Repository, streams: Iterable[Stream], most_bytes: int) -> Iterator[Read]:
    index = repository.index()
    with repository.reader() as reader:
        for stream in streams:
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
