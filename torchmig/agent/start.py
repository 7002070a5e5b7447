"""How a rank comes to life: started from its script, or restored from a snapshot."""

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from torchmig.agent import gpu as rank_gpu
from torchmig.agent import gpu_places, workfolders
from torchmig.agent.claims import Claim
from torchmig.agent.gpu import RankGpu
from torchmig.agent.gpu_state import uses_gpus
from torchmig.agent.link import RankLink
from torchmig.agent.loader import Loaded, Loader, Request
from torchmig.agent.node import Rank
from torchmig.agent.ranks import RankFolder, RankProcess
from torchmig.capture import files, folders
from torchmig.capture.device.environment import rank_environment, warn_of
from torchmig.capture.device.staging import Staging
from torchmig.capture.process import trees
from torchmig.capture.process.fetch import fetch_images
from torchmig.criu import Criu
from torchmig.cut import Report
from torchmig.errors import SnapshotUnfitError, TorchmigError
from torchmig.progress import Progress
from torchmig.repo import Depot, Manifest, RankSection
from torchmig.together import together
from torchmig.worker import SOCKET

log = logging.getLogger(__name__)

# What the ranks need so that they can be dumped; the user's own value wins.
ENVIRONMENT = {
    "UV_USE_IO_URING": "0",  # CRIU cannot dump an io_uring
}


@dataclass(frozen=True)
class RankPlan:
    """What torchrun has decided for one rank."""

    rank: int
    local_rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    stdout: str  # a file, or empty for the agent's own standard output
    stderr: str
    error_file: str


class Starter(Protocol):
    """Brings the ranks of a node to life."""

    def start(self, plans: list[RankPlan]) -> list[Rank]:
        """Start all; if one fails, none is left."""


@dataclass
class ScriptStarter:
    """Starts ranks from the script, as torchrun does."""

    job_folder: Path
    on_report: Callable[[Report], None]
    on_ended: Callable[[int], None]

    def start(self, plans: list[RankPlan]) -> list[Rank]:
        """Start all; if one fails, none is left."""
        for warning in {warn_of({**os.environ, **plan.env}) for plan in plans} - {None}:
            log.warning("%s", warning)
        ranks = []
        with ExitStack() as undo:
            for plan in plans:
                ranks.append(self._start(plan))
                undo.callback(ranks[-1].end)
            undo.pop_all()
        return ranks

    def _start(self, plan: RankPlan) -> Rank:
        folder = RankFolder(self.job_folder / f"rank-{plan.rank}")
        stdout = plan.stdout or str(folder.stdout)
        stderr = plan.stderr or str(folder.stderr)
        with ExitStack() as undo:
            claim = folder.claim()
            undo.callback(claim.release)
            for path in (folder.stdout, folder.stderr):
                path.unlink(missing_ok=True)
            link = RankLink(plan.rank, folder.control, self.on_report, self.on_ended)
            undo.callback(link.close)
            process = RankProcess()
            undo.callback(process.kill)
            link.listen()
            environment = {**ENVIRONMENT, **os.environ, **plan.env, SOCKET: str(folder.control)}
            environment.update(rank_environment(environment))
            process.spawn(plan.argv, environment, str(Path.cwd()), stdout, stderr)
            gpu = new_gpu(folder, Staging(0))
            undo.pop_all()
        return Rank(
            rank=plan.rank,
            local_rank=plan.local_rank,
            folder=folder,
            process=process,
            link=link,
            stdout=stdout,
            stderr=stderr,
            error_file=plan.error_file,
            claim=claim,
            passed_on={stdout: 0, stderr: 0},
            gpu=gpu,
        )


@dataclass(frozen=True)
class _Waiting:
    """A rank that is about to be restored."""

    plan: RankPlan
    section: RankSection
    folder: RankFolder
    claim: Claim
    gpu: RankGpu


@dataclass
class SnapshotStarter:
    """Restores ranks from a snapshot; they stand at the cut and wait for their communication."""

    depot: Depot
    manifest: Manifest
    criu: Criu
    work_dir: str | None
    progress: Progress
    on_report: Callable[[Report], None]
    on_ended: Callable[[int], None]
    gpus: str | None = None  # where GPU ranks go, as `--gpus` has it
    staging_bytes: int | None = None  # for all ranks of this node together
    loader: Loader | None = None  # which may have begun with this snapshot

    def start(self, plans: list[RankPlan]) -> list[Rank]:
        """Restore all; if one fails, none is left."""
        sections = [self._section(plan.rank) for plan in plans]
        what = f"snapshot {self.manifest.id[:8]}"
        gpu_maps = gpu_places.plan_restore(sections, self.gpus, what)
        with ExitStack() as undo:
            ahead, loaded = self._load(sections, undo)
            waiting = [
                self._prepare(plan, section, loaded.get(plan.rank), undo)
                for plan, section in zip(plans, sections, strict=True)
            ]
            work = (ahead and ahead.work) or workfolders.make(self.work_dir)
            try:
                ranks = self._restore_all(waiting, work.path, ahead, undo)
            finally:
                work.remove()
            if any(rank.gpu.in_use for rank in ranks):
                with self.progress.phase("driver"):
                    for rank in ranks:
                        rank.gpu.adopt(rank.process.tree(), gpu_maps.get(rank.rank, {}))
                    rank_gpu.resume([rank.gpu for rank in ranks])
            undo.pop_all()
        return ranks

    def _load(
        self, sections: Sequence[RankSection], undo: ExitStack
    ) -> tuple[Loader | None, dict[int, Loaded]]:
        """Have the GPU memory of ranks loaded, if that has not begun before.

        Returns:
            What brings images as well, if it has begun before, and what comes for each rank.
        """
        loader, self.loader = self.loader, None
        if loader is not None:
            undo.callback(loader.close)
            with suppress(LookupError, TorchmigError):  # tried again below
                loaded = loader.loaded(self.manifest, sections, self.progress)
                return loader if loader.work is not None else None, loaded
            loader.close()
        if not any(uses_gpus(section) for section in sections):
            return None, {}
        loader = Loader(
            Request(
                depot=self.depot.to_dict(),
                reference=self.manifest.id,
                job=None,
                ranks=[section.rank for section in sections],
                host="",
                staging_bytes=self.staging_bytes,
            )
        )
        undo.callback(loader.close)
        return None, loader.loaded(self.manifest, sections, self.progress)

    def _prepare(
        self, plan: RankPlan, section: RankSection, loaded: Loaded | None, undo: ExitStack
    ) -> _Waiting:
        folder = RankFolder(Path(section.state["folder"]))
        claim = folder.claim()
        undo.callback(claim.release)
        gpu = new_gpu(folder, Staging(0) if loaded is None else loaded.staging)
        undo.callback(gpu.close)
        gpu.take(section, loaded)
        return _Waiting(plan, section, folder, claim, gpu)

    def _restore_all(
        self, waiting: list[_Waiting], work: Path, ahead: Loader | None, undo: ExitStack
    ) -> list[Rank]:
        def restore(each: _Waiting) -> Rank:
            rank = self._restore(each, work / str(each.plan.rank))
            undo.callback(rank.end)
            return rank

        self._fetch([each.section for each in waiting], work, ahead)
        with self.progress.phase("restore"):
            return together(restore, waiting)

    def _section(self, rank: int) -> RankSection:
        for section in self.manifest.ranks:
            if section.rank == rank:
                return section
        raise SnapshotUnfitError(
            f"cannot restore snapshot {self.manifest.id[:8]}: it has no rank {rank}"
        )

    def _fetch(self, sections: Sequence[RankSection], work: Path, ahead: Loader | None) -> None:
        """Bring images and files here; every byte is checked before the first process starts."""
        with (
            self.progress.phase("fetch", begun=ahead.begun if ahead else None) as phase,
            self.depot.reading(self.manifest, phase.advance) as reader,
        ):
            reader.verify(
                stream
                for section in sections
                for stream in section.streams
                if f"/{files.FILES}" in stream.name
            )
            if ahead is not None:
                ahead.wait_images(phase.advance)
            else:
                of = (self.depot, self.criu, self.manifest.id, sections)
                fetch_images(*of, reader, work, phase.advance)
            for section in sections:
                written = [files.WrittenFile.from_dict(f) for f in section.state["files"]]
                prefix = f"rank-{section.rank}/"
                files.restore_files(reader, section.streams, written, prefix)
                folders.make(section.state["folders"])

    def _restore(self, waiting: _Waiting, dumped: Path) -> Rank:
        state, plan, folder = waiting.section.state, waiting.plan, waiting.folder
        Path(state["error_file"]).parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            link = RankLink(plan.rank, folder.control, self.on_report, self.on_ended)
            undo.callback(link.close)
            process = RankProcess()
            undo.callback(process.kill)
            link.listen()
            process.adopt(trees.restore(self.criu, process.init_pid, dumped))
            link.wait_connected(lambda: process.poll() is not None)
            undo.pop_all()
        sizes = {file["path"]: file["size_bytes"] for file in state["files"]}
        return Rank(
            rank=plan.rank,
            local_rank=plan.local_rank,
            folder=folder,
            process=process,
            link=link,
            stdout=state["stdout"],
            stderr=state["stderr"],
            error_file=state["error_file"],
            claim=waiting.claim,
            passed_on={path: sizes.get(path, 0) for path in (state["stdout"], state["stderr"])},
            gpu=waiting.gpu,
        )


def new_gpu(folder: RankFolder, staging: Staging) -> RankGpu:
    """Return a rank's GPU side, empty until something is captured or taken from a snapshot."""
    return RankGpu(folder.path / "staging", staging)


def environment() -> dict[str, str]:
    """Return what must be the same where a snapshot of this host is restored."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
    }


def check_environment(manifest: Manifest, sections: Sequence[RankSection], criu: Criu) -> None:
    """Refuse a snapshot that this host cannot restore, before anything is started.

    Raises:
        SnapshotUnfitError: Another torch, Python or machine, images of a newer CRIU, or a file that
            is missing.
    """
    here = environment()
    for what in ("torch", "python", "machine"):
        there = manifest.environment.get(what)
        if there != here[what]:
            raise SnapshotUnfitError(
                f"cannot restore snapshot {manifest.id[:8]} on this host: it was taken with "
                f"{what} '{there}' and here is '{here[what]}'; restore with the same {what}"
            )
    for section in sections:
        dumped_with = section.state.get("criu", criu.version)  # once it was not written down
        if not criu.reads(dumped_with):
            raise SnapshotUnfitError(
                f"cannot restore snapshot {manifest.id[:8]} on this host: it was taken with CRIU "
                f"'{dumped_with}', whose images the older '{criu.version}' cannot read; install "
                "that release or a newer one"
            )
    written = {file["path"] for section in manifest.ranks for file in section.state["files"]}
    needed = {
        file["path"]: files.NeededFile.from_dict(file)
        for section in sections
        for file in section.state["needs"]
        if file["path"] not in written
    }
    files.check_needed(needed.values(), f"snapshot {manifest.id[:8]}")
