"""Peak memory of writing and reading with a budget, and memory of the index for each blob.

A process of its own, because a peak is one of a process. Called by bench_repo.

    python -m benchmarks.bench_repo_memory budget FOLDER SIZE_MIB BUDGET_MIB
    python -m benchmarks.bench_repo_memory index REPOSITORY
"""

import os
import re
import resource
import sys
from pathlib import Path

from torchmig.repo import Repository

MIB = 1 << 20


def main() -> int:
    """Print one figure."""
    if sys.argv[1] == "index":
        print(index_bytes(sys.argv[2]))
    else:
        print(peak_mib(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    return 0


def index_bytes(address: str) -> float:
    """Return the resident bytes that the index takes for each blob."""
    with Repository.open(address) as repo:
        before = resident_bytes()
        index = repo.index()
        return (resident_bytes() - before) / len(index)


def peak_mib(folder: Path, size_mib: int, budget_mib: int) -> float:
    """Return the peak, above an idle process, of storing a file, checking it and reading it."""
    folder.mkdir()
    source = folder / "source"
    with source.open("wb") as file:
        for _ in range(size_mib):
            file.write(os.urandom(MIB))
    budget_bytes = budget_mib * MIB
    with Repository.open(str(folder / "repo"), create=True) as repo, source.open("rb") as file:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
        idle = peak_bytes()
        with repo.writer(budget_bytes=budget_bytes) as writer:
            stream = writer.stream("data", "host-pages")
            stream.write_file(0, file.fileno(), 0, size_mib * MIB)
            done = stream.close()
        with repo.reader(budget_bytes=budget_bytes) as reader:
            reader.verify([done])
            for _ in reader.chunks(done):
                pass
        return (peak_bytes() - idle) / MIB


def peak_bytes() -> int:
    """Return the largest resident size since the peak was last forgotten."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def resident_bytes() -> int:
    """Return what this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
