"""A rank's GPU memory between the cut and the rank's release, as its agent sees it.

Everything here is undone by `bring_back`, from wherever a request has failed. A rank that uses no
GPU goes through all of it without a step, and no driver is looked for.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

from torchmig.agent.gpu_state import state_of
from torchmig.agent.inflow import Arrivals, Inflow, Lane, in_this_process
from torchmig.agent.link import RankLink
from torchmig.agent.loader import Loaded
from torchmig.capture.device import blocks as gpu_blocks
from torchmig.capture.device import driver, gpus
from torchmig.capture.device.environment import has_gpu
from torchmig.capture.device.staging import Staging, default_size, require_room, room_for
from torchmig.capture.device.windows import Block, Piece, Ring, windows
from torchmig.repo import Depot, RankSection, Reader, Repository, Stream, Writer
from torchmig.units import format_size

log = logging.getLogger(__name__)

COPY_SECONDS = 600.0
WARM_EVERY_SECONDS = 5.0
CONTEXT_BYTES = 1 << 30  # what a process takes on a GPU besides the allocator's memory


Reading: TypeAlias = Callable[[], AbstractContextManager[Reader]]


@contextmanager
def _reading_new(depot: Depot) -> Iterator[Reader]:
    """Give a reader of what has been written and not committed."""
    with Repository.open(depot.cache or depot.address) as repo, repo.reader() as reader:
        yield reader


class GpuStage(Enum):
    """Where a rank's GPU memory is."""

    IN_PLACE = "in place"
    OUT = "out"  # in staging; the GPU's memory has been given back
    SUSPENDED = "suspended"  # and the driver has taken the rest into the process


@dataclass
class RankGpu:
    """One rank's GPU memory."""

    socket_path: Path
    staging: Staging
    stage: GpuStage = GpuStage.IN_PLACE
    facts: dict[str, Any] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    windows: list[list[Piece]] = field(default_factory=list)  # several where staging is too small
    limit_bytes: int | None = None  # of staging, where the user has set one
    # Where the bytes are that staging does not hold: how to read there, and the streams.
    spilled: tuple[Reading, list[Stream]] | None = None
    arrivals: Arrivals | None = None  # the bytes of a snapshot
    pids: list[int] = field(default_factory=list)  # what the driver has taken
    gpu_map: Mapping[UUID, UUID] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def in_use(self) -> bool:
        """Whether the rank has GPU state, as far as it has been asked."""
        return bool(self.facts.get("devices"))

    @property
    def live_bytes(self) -> int:
        """How much is kept."""
        return sum(block.size_bytes for block in self.blocks)

    def capture(self, link: RankLink, depot: Depot) -> None:
        """Copy what lives to staging and give the rank's GPU memory back.

        Args:
            link: To the rank.
            depot: Takes the bytes at once where staging cannot hold them all.
        """
        self.spilled = None
        self.facts = link.call("device_describe")
        self.seconds = {}
        if not self.in_use:
            return
        if self.facts["arena"]:
            log.warning(
                "rank %d has no arena, so its driver saves all of its GPU memory: %s",
                link.rank,
                self.facts["arena"],
            )
        seen = [gpus.parse_uuid(text) for text in self.facts["visible"]]
        self.gpu_map = driver.gpu_map(seen, {gpu: gpu for gpu in seen}, seen)
        begun = time.monotonic()
        self.blocks = [Block(*block) for block in link.call("device_live")]
        self._make_room()
        if len(self.windows) > 1:
            self._spill(link, depot)
        else:
            self._copy(link, self.pieces, out=True)
        self.seconds["copy_out"] = time.monotonic() - begun
        # From here on staging has what the device may have lost, also when this fails half way.
        self.stage = GpuStage.OUT
        link.call("device_release", timeout_seconds=COPY_SECONDS)

    @property
    def pieces(self) -> list[Piece]:
        """What staging holds, where it holds everything."""
        return self.windows[0] if self.windows else []

    def _make_room(self) -> None:
        """Lay the blocks out in staging: in one window where memory allows, else in several."""
        most = require_room("checkpoint", self.blocks, self.staging.touched_bytes, self.limit_bytes)
        size = min(room_for(self.blocks), most)
        self.staging.grow(size)
        self.windows = list(windows(self.blocks, size))

    def _spill(self, link: RankLink, depot: Depot) -> None:
        log.warning(
            "rank %d keeps %s on GPUs, more than staging holds: its GPUs are busy until that is "
            "stored; give '--staging' more",
            link.rank,
            format_size(self.live_bytes),
        )
        with self.staging.view() as view, depot.writing() as writer:
            spill = gpu_blocks.Spill(writer, self.blocks, f"rank-{link.rank}/")
            for window in self.windows:
                self._copy(link, window, out=True)
                spill.add(window, view)
            streams = spill.close()
        self.spilled = (lambda: _reading_new(depot), streams)

    def _bring(self, link: RankLink, arrivals: Arrivals) -> None:
        try:
            for pieces in arrivals:
                self._copy(link, pieces, out=False)
        finally:
            arrivals.close()

    def _read_spilled(self, prefix: str) -> Arrivals:
        assert self.spilled is not None
        reading, streams = self.spilled
        ring = Ring.lay_out(self.blocks, self.staging.size_bytes)
        self.staging.grow(ring.size_bytes)
        stored = gpu_blocks.StoredBlocks(self.blocks, streams, prefix)
        arrivals = Arrivals(ring, lambda: lane.empty(), lambda: lane.close())
        lane = Lane(stored, ring, self.staging.fd, arrivals.filled)
        Inflow([lane], lambda: in_this_process([lane], reading), arrivals.fail).start()
        return arrivals

    def _copy(self, link: RankLink, pieces: Sequence[Piece], *, out: bool) -> None:
        flat = []
        for piece in pieces:
            block = self.blocks[piece.block]
            address = block.address + piece.block_offset
            flat.append([block.device, address, piece.size_bytes, piece.offset])
        with self.staging.offered(self.socket_path) as path:
            request = {"out": out, "staging": path, "pieces": flat}
            link.call("device_copy", request, timeout_seconds=COPY_SECONDS)

    def refill(self, link: RankLink) -> None:
        """Give the rank its GPU memory again; it is under the driver's hand no more."""
        if self.stage is not GpuStage.OUT:
            return
        begun = time.monotonic()
        link.call("device_regain", timeout_seconds=COPY_SECONDS)
        if self.arrivals is not None:
            self._bring(link, self.arrivals)
            self.arrivals = None
        elif self.spilled is not None:
            self._bring(link, self._read_spilled(f"rank-{link.rank}/"))
        else:
            self._copy(link, self.pieces, out=False)
        self.seconds["copy_in"] = time.monotonic() - begun
        self.stage = GpuStage.IN_PLACE

    def store(self, writer: Writer, prefix: str) -> list[Stream]:
        """Write what was captured into the repository, if it is not there yet."""
        if self.spilled is not None:
            return self.spilled[1]
        return gpu_blocks.store(writer, self.blocks, self.pieces, self.staging.fd, prefix)

    def state(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        if not self.in_use:
            return {}
        return {"facts": self.facts, "blocks": gpu_blocks.to_state(self.blocks)}

    def take(self, section: RankSection, loaded: Loaded | None) -> None:
        """Become what the section of a snapshot says.

        Args:
            section: The rank's.
            loaded: What comes into its staging, if it has used GPUs.
        """
        self.facts = state_of(section).get("facts", {})
        if loaded is None:
            return
        self.blocks = list(loaded.blocks)
        self.arrivals = loaded.arrivals
        self.stage = GpuStage.SUSPENDED

    def adopt(self, pids: Sequence[int], gpu_map: Mapping[UUID, UUID]) -> None:
        """Take the processes that CRIU has restored, and where their GPUs are to be."""
        if self.in_use:
            self.pids = driver.using_gpus(pids)
            self.gpu_map = gpu_map

    def close(self) -> None:
        """Give staging back."""
        if self.arrivals is not None:
            self.arrivals.close()
        self.staging.close()


def suspend(ranks: Sequence[tuple[RankGpu, Sequence[int]]]) -> None:
    """Let the driver take what the ranks' processes still have on GPUs, all ranks together.

    Args:
        ranks: Each with the pids of its tree.
    """
    used = [(gpu, pids) for gpu, pids in ranks if gpu.in_use]
    for gpu, pids in used:
        gpu.pids = driver.using_gpus(pids)
    begun = time.monotonic()
    driver.suspend_all([pid for gpu, _ in used for pid in gpu.pids])
    for gpu, _ in used:
        gpu.stage = GpuStage.SUSPENDED
        gpu.seconds["driver_checkpoint"] = time.monotonic() - begun


def resume(ranks: Sequence[RankGpu]) -> None:
    """Let the driver give back what it has taken, all ranks together."""
    taken = [gpu for gpu in ranks if gpu.stage is GpuStage.SUSPENDED]
    if not taken:
        return
    begun = time.monotonic()
    maps = {pid: gpu.gpu_map for gpu in taken if gpu.gpu_map for pid in gpu.pids}
    driver.resume_all([pid for gpu in taken for pid in gpu.pids], maps)
    for gpu in taken:
        gpu.stage = GpuStage.OUT
        gpu.gpu_map = {}
        gpu.seconds["driver_restore"] = time.monotonic() - begun


class Warmer(threading.Thread):
    """Touches staging in the background, as far as the ranks' GPU memory asks for it."""

    def __init__(self, ranks: Sequence[RankGpu], staging_bytes: int | None) -> None:
        super().__init__(name="staging", daemon=True)
        self._ranks = list(ranks)
        self._size_bytes = staging_bytes // len(ranks) if staging_bytes is not None else None
        self._told = 0

    def run(self) -> None:
        """Look again and again; end with the ranks."""
        while not all(rank.staging.closed for rank in self._ranks):
            size = self._wanted()
            if size > self._told:
                log.info("staging: %s for each rank", format_size(size))
                self._told = size
            for rank in self._ranks:
                rank.staging.grow(size)
                rank.staging.touch(size)
                rank.staging.wait_touched()
            time.sleep(WARM_EVERY_SECONDS)

    def _wanted(self) -> int:
        if self._size_bytes is not None:
            return self._size_bytes
        present = gpus.list_gpus()
        used = max((gpu.total_bytes - gpu.free_bytes for gpu in present), default=0)
        if used < CONTEXT_BYTES:
            return self._told
        # Memory that is already touched is ours: only the rest is asked of what is available.
        most = self._told + default_size(len(self._ranks), max(g.total_bytes for g in present))
        return max(self._told, min(used, most))


def warm(ranks: Sequence[RankGpu], staging_bytes: int | None) -> Warmer | None:
    """Start to touch staging; nothing is done where there is no GPU."""
    if not has_gpu() or not ranks:
        return None
    warmer = Warmer(ranks, staging_bytes)
    warmer.start()
    return warmer
