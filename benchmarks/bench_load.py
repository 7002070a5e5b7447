"""How fast GPU blocks come from a folder into staging: threads of one process, or processes.

Every way brings the same blocks, which half compress, once from the disk and once from the page
cache, and is checked. *Out* is what arrives in staging, *disk* what is read for it. Needs no GPU.

    python -m benchmarks.bench_load [--size-gib 4] [--rounds 2] [--folder DIR]
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benchmarks import machine
from benchmarks.gpu_repository import forget_pages
from torchmig.agent.fillers import THREADS, in_processes
from torchmig.agent.inflow import Bring, Inflow, Lane, in_this_process
from torchmig.capture.device import blocks as gpu_blocks
from torchmig.capture.device.staging import Staging
from torchmig.capture.device.windows import Block, Ring, windows
from torchmig.repo import Repository, Stream

GIB = 1 << 30
PREFIX = "rank-0/"
PROCESSES = (2, 4, 8, 16)


def main() -> None:
    """Measure, print a table, and write the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-gib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", help="where to write; the temporary folder by default")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    ways: dict[str, int | None] = {"threads": None}
    ways |= {f"{count} processes": count for count in PROCESSES if count <= max(2, cores)}
    figures: dict[str, Any] = {"size_gib": options.size_gib}
    with tempfile.TemporaryDirectory(prefix="torchmig-bench-", dir=options.folder) as name:
        folder = Path(name) / "repo"
        blocks = [Block(0, number << 32, GIB) for number in range(options.size_gib)]
        streams, digest, stored_bytes = store(folder, blocks)
        print("| | out, from the disk | disk | out, from the page cache | cores busy |")
        print("|---|---|---|---|---|")
        for title, processes in ways.items():
            cold, warm, busy = [], [], []
            for _ in range(options.rounds):
                forget_pages(folder)
                cold.append(load(folder, blocks, streams, digest, processes)[0])
                seconds, processor_seconds = load(folder, blocks, streams, digest, processes)
                warm.append(seconds)
                busy.append(processor_seconds / seconds)
            figures[title] = {"cold": cold, "warm": warm, "busy": busy}
            size, (disk, cache) = options.size_gib * GIB, map(statistics.median, (cold, warm))
            print(
                f"| {title} | {size / disk / 1e9:.2f} GB/s | {stored_bytes / disk / 1e9:.2f} GB/s "
                f"| {size / cache / 1e9:.2f} GB/s | {statistics.median(busy):.1f} |",
                flush=True,
            )
    print(f"raw figures in {machine.save('bench_load', figures)}")


def store(folder: Path, blocks: Sequence[Block]) -> tuple[list[Stream], bytes, int]:
    """Write blocks of random numbers; return the streams, a hash of all, and the stored bytes."""
    pieces = next(windows(blocks, sum(block.size_bytes for block in blocks)))
    noise = np.random.default_rng(1)
    with Staging(0) as staging, Repository.open(str(folder), create=True) as repository:
        staging.grow(sum(block.size_bytes for block in blocks))
        with staging.view() as view:
            for start in range(0, len(view), GIB):
                numbers = noise.integers(0, 1 << 30, GIB // 8, dtype=np.int64)
                view[start : start + GIB] = memoryview(numbers).cast("B")
            digest = hash_of(view)
        with repository.writer() as writer:
            streams = gpu_blocks.store(writer, blocks, pieces, staging.fd, PREFIX)
    # Only now: the last packs are counted when they are stored.
    return streams, digest, writer.stats.stored_bytes


def load(
    folder: Path,
    blocks: Sequence[Block],
    streams: Sequence[Stream],
    digest: bytes,
    processes: int | None,
) -> tuple[float, float]:
    """Bring all blocks into fresh memory; return the seconds and the processors' seconds."""
    ring = Ring.lay_out(blocks, 2 * sum(block.size_bytes for block in blocks))
    errors: list[Exception] = []
    with Staging(0) as staging, Repository.open(str(folder)) as repository:
        staging.grow(ring.size_bytes)
        stored = gpu_blocks.StoredBlocks(blocks, streams, PREFIX)
        lanes = [Lane(stored, ring, staging.fd, lambda: None)]
        begun, busy_before = time.monotonic(), busy_seconds()

        @contextmanager
        def bringing() -> Iterator[Sequence[Bring]]:
            if processes is None:
                with in_this_process(lanes, repository.reader) as brings:
                    yield brings
            else:
                with (
                    repository.reader(threads=THREADS) as reader,
                    in_processes(lanes, reader, processes) as brings,
                ):
                    yield brings

        Inflow(lanes, bringing, errors.append).run()
        seconds, busy = time.monotonic() - begun, busy_seconds() - busy_before
        assert not errors, errors
        lanes[0].close()
        with staging.view() as view:
            assert hash_of(view) == digest, "what has come is not what was stored"
    return seconds, busy


def busy_seconds() -> float:
    """Return what processors have spent on this process and on those of it that have ended."""
    of = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of)


def hash_of(data: memoryview) -> bytes:
    """Return the hash of a lot of bytes."""
    return blake3(data, max_threads=blake3.AUTO).digest()


if __name__ == "__main__":
    main()
