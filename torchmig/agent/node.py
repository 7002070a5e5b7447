"""What one agent does with its own ranks in a request: each phase, and its way back.

The coordinator calls these methods, on its own node directly and on the others over the mesh, so
arguments and results are plain data. How far each rank has got is kept here, so that `walk_back`
is right from anywhere.
"""

import logging
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torchmig.agent import gpu as rank_gpu
from torchmig.agent import gpu_places, workfolders
from torchmig.agent.claims import Claim
from torchmig.agent.gpu import GpuStage, RankGpu
from torchmig.agent.gpu_state import STATE
from torchmig.agent.link import RankGoneError, RankLink
from torchmig.agent.ranks import RankFolder, RankProcess
from torchmig.agent.workfolders import WorkFolder
from torchmig.capture import files, folders
from torchmig.capture.device import gpus
from torchmig.capture.process import aside, images, trees
from torchmig.capture.process.refused import find_refused
from torchmig.criu import Criu
from torchmig.cut import Report, State, unpack_orders
from torchmig.errors import HostUnfitError, RequestWithdrawnError, TorchmigError
from torchmig.gpu_settings import misfits
from torchmig.repo import Depot, RankSection, Stream
from torchmig.repo.manifest import decode_manifest
from torchmig.together import together
from torchmig.units import format_size

log = logging.getLogger(__name__)

STACK_SECONDS = 5.0  # a rank that holds the GIL in native code cannot answer


class Stage(Enum):
    """How far a rank is from running."""

    RUNNING = "running"
    DETACHED = "detached"  # its control socket is closed, it may be dumped
    STOPPED = "stopped"  # dumped and left stopped
    GONE = "gone"  # ended on purpose, after the commit


@dataclass
class Rank:
    """One rank of this node."""

    rank: int
    local_rank: int
    folder: RankFolder
    process: RankProcess
    link: RankLink
    stdout: str
    stderr: str
    error_file: str
    claim: Claim  # to the folder
    passed_on: dict[str, int]  # how much of a stream's file has been printed in an earlier life
    gpu: RankGpu
    stage: Stage = Stage.RUNNING
    # Images and copies of files, until they are in the repository.
    capture: WorkFolder | None = None
    image_bytes: int = 0
    written: list[files.WrittenFile] = field(default_factory=list)
    needed: list[files.NeededFile] = field(default_factory=list)
    occupied: list[folders.Folder] = field(default_factory=list)

    def end(self) -> None:
        """End the process and give the folder up; may be called twice."""
        if self.claim.released:
            return  # what is in the folder may be another agent's by now
        self.process.kill()
        self.link.close()
        self.gpu.close()
        self.claim.release()

    @property
    def images(self) -> Path:
        """Folder of CRIU's images."""
        assert self.capture is not None
        return self.capture.path / "images"

    @property
    def copies(self) -> Path:
        """Folder of the copied files."""
        assert self.capture is not None
        return self.capture.path / "files"


@dataclass
class Node:
    """The ranks of one agent, and what can be done with them."""

    node: int
    host: str
    ranks: list[Rank]
    criu: Criu | None
    unfit: str  # why this node cannot checkpoint; empty if it can
    work_dir: str | None
    on_report: Callable[[Report], None]
    drain: Callable[[], None]
    on_finished: Callable[[], None]
    close_connections: bool = False  # as trees.dump has it
    _warmer: rank_gpu.Warmer | None = None
    finished: bool = False  # ended on purpose, after the commit
    # Set while the ranks are not what the launcher's monitor may look at.
    frozen: threading.Event = field(default_factory=threading.Event)

    def serve(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method by name; only those that the coordinator may call."""
        if method not in _SERVED:
            raise TorchmigError(f"agents do not serve '{method}'")
        return getattr(self, method)(**arguments)

    def members(self) -> list[int]:
        """Return the global ranks of this node."""
        return [rank.rank for rank in self.ranks]

    def preflight(self) -> dict[str, Any]:
        """Say whether this node can checkpoint now, and whether its ranks use GPUs.

        Raises:
            HostUnfitError: It cannot, and why.
        """
        if self.unfit:
            raise HostUnfitError(self.unfit)
        uses_gpu = any(_uses_gpu(rank.process.pid) for rank in self.ranks)
        if uses_gpu:
            gpus.require_driver()
            if found := misfits(os.environ):
                raise HostUnfitError(f"cannot checkpoint GPU ranks: {'; '.join(map(str, found))}")
        need = sum(dumped_bytes(pid) for rank in self.ranks for pid in rank.process.tree())
        folder = workfolders.root(self.work_dir)
        free = shutil.disk_usage(folder).free
        if free < need:
            raise HostUnfitError(
                f"cannot checkpoint on {self.host}: the images need up to {format_size(need)} "
                f"and '{folder}' has {format_size(free)} free; make room or set '--work-dir'"
            )
        return {"uses_gpu": uses_gpu}

    def orders(self, packed: Any) -> None:
        """Hand orders of the cut to the ranks that they are for."""
        by_rank = {rank.rank: rank for rank in self.ranks}
        for number, order in unpack_orders(packed):
            rank = by_rank.get(number)
            if rank is None:
                continue
            state = None
            if rank.link.ended or rank.process.poll() is not None:
                state = State.ENDED
            else:
                try:
                    if not rank.link.order(order):
                        state = State.NOT_READY
                except RankGoneError:
                    state = State.ENDED
            if state is not None:
                self.on_report(_absent(number, order.request, order.serial, state))

    def call(
        self, name: str, request: Any = None, timeout_seconds: float = 60.0
    ) -> list[tuple[int, Any]]:
        """Call a phase in every rank, side by side."""
        return self._each(lambda rank: (rank.rank, rank.link.call(name, request, timeout_seconds)))

    def capture(self, depot: dict[str, Any]) -> list[dict[str, Any]]:
        """Bring the GPU memory of all ranks into staging and give their GPUs free."""
        self.frozen.set()
        self._each(lambda rank: rank.gpu.capture(rank.link, Depot.from_dict(depot)))
        rank_gpu.suspend([(rank.gpu, rank.process.tree()) for rank in self.ranks])
        return [
            {"rank": rank.rank, "live_bytes": rank.gpu.live_bytes, "seconds": rank.gpu.seconds}
            for rank in self.ranks
        ]

    def stacks(self) -> list[tuple[int, str]]:
        """Return the Python stack of each rank's main thread, or why there is none."""
        found = []
        for rank in self.ranks:
            try:
                found.append((rank.rank, rank.link.call("stack", timeout_seconds=STACK_SECONDS)))
            except TorchmigError as error:
                found.append((rank.rank, f"no stack: {error}"))
        return found

    def refused(self) -> list[str]:
        """Return what keeps the ranks, which stand at the cut, from being dumped or restored."""
        reasons = []
        for number, facts in self.call("describe"):
            tree = self._tree(number)
            found = facts["refused"] + self._held(tree, facts["sockets"])
            if facts["waits_on_gpus"]:
                found += gpu_places.not_alone(tree)
            reasons += [f"rank {number}: {reason}" for reason in found]
        return reasons

    def left_over(self) -> list[str]:
        """Return what is connected although communication has been taken down.

        A communicator that torch.distributed has not made looks like one of its own until then.
        """
        return [
            f"rank {number}: {reason}"
            for number, sockets in self.call("nccl_sockets")
            for reason in self._held(self._tree(number), [], sockets)
        ]

    def _held(
        self, tree: list[int], torch_sockets: list[int], nccl_sockets: Sequence[int] = ()
    ) -> list[str]:
        return find_refused(
            tree,
            torch_sockets,
            nccl_sockets,
            takes_sockets=self.criu is None or self.criu.takes_sockets,
            closes_connections=self.close_connections,
        )

    def _tree(self, number: int) -> list[int]:
        """Return the pids of a rank's tree."""
        return next(each for each in self.ranks if each.rank == number).process.tree()

    def dump(self) -> list[dict[str, Any]]:
        """Dump all rank trees, side by side, and copy their files; the trees are left stopped."""
        self.frozen.set()
        for rank in self.ranks:
            rank.capture = workfolders.make(self.work_dir)
        return self._each(self._dump_rank)

    def _dump_rank(self, rank: Rank) -> dict[str, Any]:
        assert self.criu is not None
        rank.images.mkdir(mode=0o700)
        rank.copies.mkdir(mode=0o700)
        rank.stage = Stage.DETACHED
        rank.link.detach()
        seconds = trees.dump(
            self.criu,
            rank.process.init_pid,
            rank.process.inner_pid,
            rank.images,
            leave_stopped=True,
            close_connections=self.close_connections,
        )
        rank.stage = Stage.STOPPED
        streams = [str(rank.folder.stdout), str(rank.folder.stderr)]
        tree = rank.process.tree()
        rank.written, rank.needed = files.look(tree, streams)
        rank.occupied = folders.look(tree)
        files.copy_files(rank.written, rank.copies)
        rank.image_bytes = sum(path.stat().st_size for path in rank.images.iterdir())
        return {"rank": rank.rank, "seconds": seconds, "image_bytes": rank.image_bytes}

    def save(self, depot: dict[str, Any]) -> dict[str, Any]:
        """Store images and files of all ranks; return their sections and what it cost."""
        assert self.criu is not None
        begun = time.monotonic()
        streams, stats = self._store(Depot.from_dict(depot), self.criu)
        return {
            "sections": [self._section(rank, streams[rank.rank]).to_dict() for rank in self.ranks],
            "seconds": time.monotonic() - begun,
            "stats": stats,
        }

    def _store(self, depot: Depot, criu: Criu) -> tuple[dict[int, list[Stream]], dict[str, int]]:
        """Store all streams of each rank, large images in processes of their own."""
        streams: dict[int, list[Stream]] = {}
        with ThreadPoolExecutor(max_workers=len(self.ranks)) as pool, depot.writing() as writer:
            beside = {
                rank.rank: pool.submit(
                    aside.store_images, depot, criu, rank.images, f"rank-{rank.rank}/"
                )
                for rank in self.ranks
                if aside.pays(rank.image_bytes)
            }
            for rank in self.ranks:
                prefix = f"rank-{rank.rank}/"
                own = streams[rank.rank] = []
                if rank.rank not in beside:
                    own += images.store_images(criu, writer, rank.images, prefix)
                own += files.store_files(writer, rank.written, rank.copies, prefix)
                own += rank.gpu.store(writer, prefix)
        stats = Counter(asdict(writer.stats))
        for number, future in beside.items():
            stored, its_stats = future.result()
            streams[number] += stored
            stats.update(asdict(its_stats))
        return streams, dict(stats)

    def keep(self, depot: dict[str, Any], manifest: bytes) -> None:
        """Commit a snapshot to this node's folder, beside the blobs of its own ranks."""
        Depot.from_dict(depot).keep(decode_manifest(manifest, "the new snapshot"))

    def upload(
        self, depot: dict[str, Any], manifest: bytes, deadline_seconds: float | None
    ) -> None:
        """Send what this node's folder has of a snapshot to the repository."""
        snapshot = decode_manifest(manifest, "the new snapshot")
        own = set(self.members())
        sections = [section for section in snapshot.ranks if section.rank in own]
        Depot.from_dict(depot).upload(snapshot, sections, deadline_seconds)

    def _section(self, rank: Rank, streams: list[Stream]) -> RankSection:
        assert self.criu is not None
        state = {
            "criu": self.criu.version,
            "local_rank": rank.local_rank,
            "folder": str(rank.folder.path),
            "stdout": rank.stdout,
            "stderr": rank.stderr,
            "error_file": rank.error_file,
            "files": [file.to_dict() for file in rank.written],
            "needs": [file.to_dict() for file in rank.needed],
            "folders": rank.occupied,
            STATE: rank.gpu.state(),
        }
        return RankSection(rank.rank, self.host, rank.process.inner_pid, streams, state)

    def reattach(self) -> None:
        """Let dumped ranks go on and take their connections again; they still stand at the cut."""
        self._each(self._wake)
        rank_gpu.resume([rank.gpu for rank in self.ranks])
        self._each(self._reconnect)
        self.refill()
        self.frozen.clear()

    def warm_staging(self, staging_bytes: int | None) -> None:
        """Find memory for what a checkpoint will copy from GPUs, in the background."""
        for rank in self.ranks:
            if staging_bytes is not None:
                rank.gpu.limit_bytes = staging_bytes // len(self.ranks)
        self._warmer = rank_gpu.warm([rank.gpu for rank in self.ranks], staging_bytes)

    @property
    def uses_gpus(self) -> bool:
        """Whether a rank has GPU state, as far as the ranks have been asked."""
        return any(rank.gpu.in_use for rank in self.ranks)

    def refill(self) -> None:
        """Give the ranks their GPU memory again."""
        self._each(lambda rank: rank.gpu.refill(rank.link))

    def clean(self) -> None:
        """Remove what was captured."""
        for rank in self.ranks:
            capture, rank.capture = rank.capture, None
            if capture is not None:
                capture.remove()

    def release(self) -> None:
        """Let all ranks go on with the script."""
        for rank in self.ranks:
            try:
                rank.link.release()
            except RankGoneError as error:
                log.debug("not released: %s", error)

    def finish(self) -> None:
        """End the ranks: the snapshot has been committed."""
        self.frozen.set()
        self.drain()
        for rank in self.ranks:
            rank.stage = Stage.GONE
        self._each(Rank.end)
        self.clean()
        self.finished = True
        self.on_finished()

    def walk_back(self) -> None:
        """Bring all ranks back under control, from wherever they are; may be called twice."""
        try:
            if any(
                rank.stage is not Stage.RUNNING or rank.gpu.stage is not GpuStage.IN_PLACE
                for rank in self.ranks
            ):
                self.reattach()
            self.clean()
        finally:
            self.frozen.clear()

    def _wake(self, rank: Rank) -> None:
        if rank.stage is Stage.STOPPED:
            for pid in rank.process.tree():
                with suppress(ProcessLookupError):  # killed meanwhile
                    os.kill(pid, signal.SIGCONT)
            rank.stage = Stage.DETACHED
        if rank.stage is Stage.DETACHED:
            rank.link.listen()

    def _reconnect(self, rank: Rank) -> None:
        if rank.stage is Stage.DETACHED:
            rank.link.wait_connected(lambda: rank.process.poll() is not None)
            rank.stage = Stage.RUNNING

    def _each(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Do something with all ranks side by side."""

        def foreseen(rank: Rank) -> Any:
            try:
                return work(rank)
            except TorchmigError:
                raise
            except Exception as error:
                raise RequestWithdrawnError(f"{type(error).__name__}: {error}") from error

        return together(foreseen, self.ranks)


_SERVED = {
    "members",
    "preflight",
    "orders",
    "call",
    "capture",
    "refused",
    "left_over",
    "stacks",
    "dump",
    "save",
    "keep",
    "upload",
    "reattach",
    "clean",
    "release",
    "finish",
    "walk_back",
}


def _absent(rank: int, request: int, serial: int, state: State) -> Report:
    """Return the report of a rank that cannot speak for itself."""
    return Report(rank, request, serial, time.monotonic_ns() // 1000, state)


def dumped_bytes(pid: int) -> int:
    """Return how much of a process's memory its images may hold: none that is only a file's."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it ended meanwhile
    own = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(fields[1]) * 1024 for fields in own)


def _uses_gpu(pid: int) -> bool:
    try:
        return "/dev/nvidia" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False  # it ended meanwhile
