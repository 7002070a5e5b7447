"""What the repository costs, as ratios to the plain way on the same machine in the same run.

Folder: writing fresh data against a parallel copy that also computes blake3; duplicate data against
the hash alone. S3: put and get against the minio SDK with as many threads on the same server. Then
what equal ranks cost, a million blobs, peak memory, and requests for each MiB.

    python -m benchmarks.bench_repo [--size-mib 512] [--rounds 5] [--folder DIR] [--skip-s3]
"""

import argparse
import io
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.machine import save
from torchmig.repo import JobName, Manifest, RankSection, Repository
from torchmig.repo.blob import CHUNK_BYTES, Kind
from torchmig.repo.plan import plan_reads
from torchmig.repo.pool import default_threads
from torchmig.store import Buffer, Store

MIB = 1 << 20
PACK = 32 * MIB
MILLION = 1_000_000
PUT_THREADS = 4


def main() -> int:
    """Measure, print, and write the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; the temporary folder by default")
    parser.add_argument("--skip-s3", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {"size_mib": options.size_mib, "rounds": options.rounds}
    with tempfile.TemporaryDirectory(prefix="torchmig-bench-", dir=options.folder) as name:
        folder = Path(name)
        data = fresh_bytes(options.size_mib * MIB)
        for kind in (Kind.HOST_PAGES, Kind.GPU_BLOCK):
            figures[f"folder {kind}"] = measure_folder(folder, data, kind, options.rounds)
        figures["equal ranks"] = measure_equal_ranks(folder)
        figures["million blobs"] = measure_million(folder)
        figures["memory"] = measure_memory(folder, options.size_mib)
        if not options.skip_s3:
            figures["s3"] = measure_s3(folder, data, options.rounds)
    print(f"raw figures in {save('bench_repo', figures)}")
    return 0


def fresh_bytes(size_bytes: int) -> bytearray:
    """Return bytes that do not compress and of which no 64 KiB are equal."""
    block = os.urandom(min(size_bytes, 64 * MIB))
    data = bytearray((block * (size_bytes // len(block) + 1))[:size_bytes])
    for at in range(0, size_bytes, 64 << 10):
        data[at : at + 16] = secrets.token_bytes(16)
    return data


def measure_folder(folder: Path, data: bytearray, kind: Kind, rounds: int) -> dict[str, Any]:
    """Compare fresh and duplicate writes with the plain way, round by round."""
    rates: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        rates.setdefault(name, []).append(rate(len(data), action))

    for _ in range(rounds):
        note("copy and hash", lambda: copy_and_hash(folder / "plain", data, CHUNK_BYTES[kind]))
        with Repository.open(str(folder / "repo"), create=True) as repo:
            note("fresh", lambda repo=repo: write(repo, data, kind))
            note("hash", lambda: hash_all(data, CHUNK_BYTES[kind]))
            note("duplicate", lambda repo=repo: write(repo, data, kind))
            stream = write(repo, data, kind)
            note("verify", lambda repo=repo, stream=stream: verify(repo, stream))
            note("restore", lambda repo=repo, stream=stream: restore(repo, stream, folder / "out"))
        shutil.rmtree(folder / "repo")
    fresh = ratio(rates["fresh"], rates["copy and hash"])
    duplicate = ratio(rates["duplicate"], rates["hash"])
    show(f"folder, {kind}", rates)
    print(f"  fresh / copy and hash {fresh:.2f} (goal 0.7), duplicate / hash {duplicate:.2f} (0.9)")
    return {"gib_per_second": rates, "fresh_ratio": fresh, "duplicate_ratio": duplicate}


def measure_equal_ranks(folder: Path) -> dict[str, Any]:
    """Store the same arena segments from two ranks, and host pages of their own."""
    segments = [fresh_bytes(48 * MIB + 300_000), fresh_bytes(20 * MIB)]
    stored = []
    for ranks in (1, 2):
        place = folder / f"ranks{ranks}"
        with Repository.open(str(place), create=True) as repo, repo.hold():
            sections = []
            for rank in range(ranks):
                with repo.writer() as writer:
                    streams = []
                    for number, segment in enumerate(segments):
                        stream = writer.stream(f"rank-{rank}/segment-{number}", Kind.GPU_BLOCK)
                        stream.write(0, segment)
                        streams.append(stream.close())
                sections.append(RankSection(rank, "node", 1, streams))
            repo.commit(Manifest(JobName("bench"), "suspend", ranks=sections))
        stored.append(sum(path.stat().st_size for path in place.rglob("*") if path.is_file()))
        shutil.rmtree(place)
    print(f"equal GPU blocks of two ranks take {stored[1] / stored[0]:.4f} of one's (goal 1.05)")
    return {"stored_bytes": stored, "ratio": stored[1] / stored[0]}


def measure_million(folder: Path) -> dict[str, Any]:
    """List, show and plan with a million blobs; each is small, to spare the disk."""
    place = folder / "million"
    with Repository.open(str(place), create=True) as repo:
        with repo.writer() as writer:
            stream = writer.stream("pages", Kind.HOST_PAGES)
            for number in range(MILLION):
                stream.write(number << 16, number.to_bytes(16, "little") + b"x")
            done = stream.close()
        ranks = [RankSection(0, "node", 1, [done])]
        repo.commit(Manifest(JobName("bench"), "suspend", ranks=ranks))
    seconds: dict[str, float] = {}
    with Repository.open(str(place)) as repo:
        with timed(seconds, "snapshots"):
            repo.snapshots()
        with timed(seconds, "show"):
            manifest = repo.load("latest")
        with timed(seconds, "index"):
            index = repo.index()
        with repo.reader() as reader:
            with timed(seconds, "extents"):
                extents = reader.extents(manifest.streams[0])
            with timed(seconds, "plan"):
                for start in range(0, len(extents), 1 << 16):
                    plan_reads(index, extents[start : start + (1 << 16)], PACK)
    blob_bytes = in_a_process("index", str(place))
    shutil.rmtree(place)
    print(f"{MILLION} blobs: " + ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()))
    print(f"  index memory {blob_bytes:.0f} bytes a blob (goal 200)")
    return {"seconds": seconds, "index_bytes_per_blob": blob_bytes}


def measure_memory(folder: Path, size_mib: int) -> dict[str, Any]:
    """Write and verify in a fresh process with a budget, and compare its peak with it."""
    found = {}
    for budget_mib in (64, 256):
        place = folder / "memory"
        found[budget_mib] = in_a_process("budget", str(place), str(size_mib), str(budget_mib))
        print(f"peak memory with a budget of {budget_mib} MiB: {found[budget_mib]:.0f} MiB more")
        shutil.rmtree(place)
    return {"peak_mib_by_budget_mib": found}


def measure_s3(folder: Path, data: bytearray, rounds: int) -> dict[str, Any]:
    """Compare put and get with the minio SDK alone, against one server."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))
    from s3_servers import start_seaweedfs

    from torchmig.store.s3 import S3Store

    server = start_seaweedfs(folder / "server")
    rates: dict[str, list[float]] = {}
    try:
        os.environ.update(server.environment)
        for number in range(rounds):
            bucket = f"bench-{number}"
            plain = S3Store(bucket, "plain")
            plain.create()
            for at in range(0, len(data), 64 << 10):  # a new round is new to the server as well
                data[at : at + 8] = (number << 40 | at).to_bytes(8, "little")
            for name, action in (("SDK put", sdk_put), ("SDK get", sdk_get)):
                seconds = timed_seconds(lambda action=action, plain=plain: action(plain, data))
                rates.setdefault(name, []).append(len(data) / seconds / (1 << 30))
            counted = CountingStore(S3Store(bucket, "repo"))
            with Repository.on_store(counted, create=True) as repo:
                rates.setdefault("put", []).append(
                    rate(len(data), lambda repo=repo: write(repo, data, Kind.HOST_PAGES))
                )
                puts = counted.requests
                stream = write(repo, data, Kind.HOST_PAGES)
                counted.requests = 0
                rates.setdefault("get", []).append(
                    rate(len(data), lambda repo=repo, stream=stream: verify(repo, stream))
                )
    finally:
        server.stop()
    mib = len(data) / MIB
    put_ratio, get_ratio = (
        ratio(rates["put"], rates["SDK put"]),
        ratio(rates["get"], rates["SDK get"]),
    )
    show("S3 (SeaweedFS on this machine)", rates)
    print(f"  put {put_ratio:.2f} and get {get_ratio:.2f} of the SDK alone (goal 0.8)")
    print(f"  MiB a request: {mib / puts:.1f} put, {mib / counted.requests:.1f} got (goal 16)")
    return {
        "gib_per_second": rates,
        "put_ratio": put_ratio,
        "get_ratio": get_ratio,
        "put_requests": puts,
        "get_requests": counted.requests,
    }


class CountingStore(Store):
    """Counts requests."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.read_bytes = inner.read_bytes
        self.requests = 0

    def exists(self) -> bool:
        return self._count(self.inner.exists())

    def create(self) -> None:
        self._count(self.inner.create())

    def put(self, name: str, parts: Any, *, durable: bool = True) -> None:
        self._count(self.inner.put(name, parts, durable=durable))

    def get(self, name: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        return self._count(self.inner.get(name, offset_bytes, size_bytes))

    def get_into(self, name: str, offset_bytes: int, buffer: memoryview) -> memoryview:
        return self._count(self.inner.get_into(name, offset_bytes, buffer))

    def list(self, prefix: str) -> Iterator[Any]:
        return self._count(self.inner.list(prefix))

    def delete(self, name: str) -> None:
        self._count(self.inner.delete(name))

    def sweep(self, older_than_seconds: float) -> int:
        return self.inner.sweep(older_than_seconds)

    def _count(self, result: Any) -> Any:
        self.requests += 1
        return result


def write(repo: Repository, data: Buffer, kind: Kind) -> Any:
    """Write one stream, durably."""
    with repo.writer() as writer:
        stream = writer.stream("data", kind)
        stream.write(0, data)
        return stream.close()


def verify(repo: Repository, stream: Any) -> None:
    """Read and check a stream."""
    with repo.reader() as reader:
        reader.verify([stream])


def restore(repo: Repository, stream: Any, path: Path) -> None:
    """Write a stream into a file and remove it."""
    with repo.reader() as reader:
        reader.restore(stream, path)
    path.unlink()


def hash_all(data: bytearray, chunk: int) -> None:
    """Hash in as many threads as the repository uses."""
    view = memoryview(data)

    def work(start: int, stop: int) -> None:
        for at in range(start, stop, chunk):
            blake3(view[at : at + chunk]).digest()

    side_by_side(work, len(data), default_threads())


def copy_and_hash(path: Path, data: bytearray, chunk: int) -> None:
    """Hash and write the bytes in as many threads as the repository uses, and make them durable."""
    view = memoryview(data)

    def work(start: int, stop: int) -> None:
        with path.with_suffix(f".{start}").open("wb", buffering=0) as file:
            for block in range(start, stop, 4 * MIB):
                for at in range(block, min(stop, block + 4 * MIB), chunk):
                    blake3(view[at : at + chunk]).digest()
                file.write(view[block : min(stop, block + 4 * MIB)])
            os.fsync(file.fileno())

    side_by_side(work, len(data), default_threads())
    for each in path.parent.glob(f"{path.name}.*"):
        each.unlink()


def sdk_put(store: Any, data: bytearray) -> None:
    """Put objects of a pack's size with the SDK alone."""
    client, view = store._minio(), memoryview(data)

    def work(start: int, stop: int) -> None:
        for at in range(start, stop, PACK):
            body = bytes(view[at : min(stop, at + PACK)])
            client.put_object(store.bucket, f"plain/{at}", io.BytesIO(body), len(body))

    side_by_side(work, len(data), PUT_THREADS)


def sdk_get(store: Any, data: bytearray) -> None:
    """Get the same objects with the SDK alone."""
    client = store._minio()

    def work(start: int, stop: int) -> None:
        for at in range(start, stop, PACK):
            response = client.get_object(store.bucket, f"plain/{at}")
            response.read()
            response.close()
            response.release_conn()

    side_by_side(work, len(data), default_threads())


def side_by_side(work: Callable[[int, int], None], size_bytes: int, threads: int) -> None:
    """Run `work` over equal parts of a size, cut at packs, in threads."""
    part = -(-size_bytes // threads // PACK) * PACK
    running = [
        threading.Thread(target=work, args=(start, min(size_bytes, start + part)))
        for start in range(0, size_bytes, part)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def timed_seconds(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long a `with` block takes."""
    begun = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begun


def rate(size_bytes: int, action: Callable[[], object]) -> float:
    """Return GiB a second."""
    return size_bytes / timed_seconds(action) / (1 << 30)


def ratio(rates: list[float], base: list[float]) -> float:
    """Return the median of the ratios of each round, since rounds differ more than their parts."""
    return statistics.median(one / other for one, other in zip(rates, base, strict=True))


def show(title: str, rates: dict[str, list[float]]) -> None:
    """Print the medians."""
    print(title)
    for name, found in rates.items():
        print(f"  {name:<14}{statistics.median(found):7.2f} GiB/s")


def in_a_process(*arguments: str) -> float:
    """Return the one figure that bench_repo_memory prints."""
    command = [sys.executable, "-m", "benchmarks.bench_repo_memory", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
