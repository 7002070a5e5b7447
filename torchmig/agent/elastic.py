"""torchelastic's agent with ranks that can be stopped, saved and restored."""

import logging
import uuid
from base64 import b64decode
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.elastic.agent.server.local_elastic_agent as local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from torchmig.agent.context import RankContext
from torchmig.agent.loader import Loader
from torchmig.agent.request import Outcome, Place
from torchmig.agent.session import Meeting, Session, Settings, new_secret
from torchmig.agent.start import ScriptStarter, SnapshotStarter, Starter, check_environment
from torchmig.errors import HostUnfitError, SnapshotUnfitError
from torchmig.progress import Progress
from torchmig.repo import Manifest

log = logging.getLogger(__name__)

REBUILD_SECONDS = 300.0


class SuspendedError(Exception):
    """The job has been suspended; not a failure, but the way out of torchelastic's loop."""


@dataclass
class Life:
    """What outlives a restart of the ranks."""

    settings: Settings
    restore: Manifest | None
    progress: Progress
    loader: Loader | None  # which may have begun with what is restored
    on_session: Callable[[Session], None]
    on_restored: Callable[[], None]
    on_checkpointed: Callable[[Outcome], None]
    suspended: bool = False
    outcome: Outcome | None = None

    def on_suspended(self, outcome: Outcome | None) -> None:
        """Take note: the monitor loop ends at its next turn."""
        self.outcome = outcome
        self.suspended = True


class Agent(LocalElasticAgent):
    """Runs a job as LocalElasticAgent does, and carries requests out."""

    def __init__(self, life: Life, **options: Any) -> None:
        super().__init__(**options)
        self._life = life
        self._session: Session | None = None

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        if self._session is not None:
            self._session.close()
        if self._life.settings.plain:
            plain: dict[int, Any] = super()._start_workers(worker_group)
            return plain
        session = self._session = self._open_session(worker_group)
        with _replaced(local_elastic_agent, "start_processes", self._start_ranks):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        if self._life.restore is not None:
            self._wake(worker_group, session, self._life.restore)
        self._life.on_session(session)
        if self._life.restore is not None:
            self._life.restore = None  # a later restart begins at the script, as under torchrun
            self._life.on_restored()
        return pids

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        if self._life.suspended:
            raise SuspendedError
        node = self._session.node if self._session is not None else None
        if node is not None and node.frozen.is_set():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _open_session(self, worker_group: Any) -> Session:
        """Agree with the other agents on the job's name and on where they meet."""
        life = self._life
        store = worker_group.store
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        key = f"torchmig/meeting/{restarts}"
        manifest = life.restore
        job = manifest.job if manifest is not None else life.settings.job
        prefix = f"torchmig-{uuid.uuid4().hex[:12]}" if manifest is not None else ""
        meeting = Meeting(
            job=job.name,
            job_id=job.id,
            secret=new_secret(),
            host=worker_group.master_addr,
            port=0,
            prefix=prefix,
            generation=uuid.uuid4().hex[:12],
            snapshot=manifest.id if manifest is not None else "",
        )
        coordinator = worker_group.group_rank == 0
        if not coordinator:
            own = meeting.snapshot
            meeting = Meeting.from_json(store.get(key).decode())
            store.set(f"{key}/{worker_group.group_rank}", own)
            _require_one_snapshot(own, meeting.snapshot, 0)
        session = Session(
            settings=life.settings,
            meeting=meeting,
            group_rank=worker_group.group_rank,
            group_world_size=worker_group.group_world_size,
            world_size=worker_group.workers[0].world_size,
            place=Place(worker_group.master_addr, worker_group.master_port, meeting.prefix),
            progress=life.progress,
            on_suspended=life.on_suspended,
            on_checkpointed=life.on_checkpointed,
        )
        if coordinator:
            session.meeting = replace(meeting, port=session.listen())
            store.set(key, session.meeting.to_json())
            # Where nothing is restored nobody has to answer: ranks start as soon as they can.
            for node in range(1, worker_group.group_world_size) if meeting.snapshot else ():
                other = store.get(f"{key}/{node}").decode()
                _require_one_snapshot(meeting.snapshot, other, node)
        return session

    def _start_ranks(self, name: str, entrypoint: Any, **options: Any) -> Any:
        """Stand in for torch's start_processes."""
        session = self._session
        assert session is not None
        if not isinstance(entrypoint, str):
            session.settings = replace(
                session.settings,
                unfit="cannot checkpoint a job started with '--run-path': "
                "start the script itself with torchmig-run",
            )
            return local_elastic_agent_start(name=name, entrypoint=entrypoint, **options)
        options.pop("start_method", None)
        context = RankContext(
            starter=self._starter(session),
            on_started=session.started,
            name=name,
            entrypoint=entrypoint,
            **options,
        )
        try:
            context.start()
        except BaseException:
            context.close()
            raise
        return context

    def _starter(self, session: Session) -> Starter:
        settings = self._life.settings
        manifest = self._life.restore
        if manifest is None:
            return ScriptStarter(
                Path(settings.runtime_dir) / session.meeting.job,
                session._on_report,
                session.on_rank_ended,
            )
        if settings.criu is None:
            raise HostUnfitError(settings.unfit)
        worker_ranks = {worker.global_rank for worker in self._worker_group.workers}
        sections = [section for section in manifest.ranks if section.rank in worker_ranks]
        if session.world_size != len(manifest.ranks):
            raise SnapshotUnfitError(
                f"cannot restore snapshot {manifest.id[:8]}: it holds {len(manifest.ranks)} ranks "
                f"and this job has {session.world_size}; start it with the same number of ranks"
            )
        check_environment(manifest, sections, settings.criu)
        return SnapshotStarter(
            settings.depot,
            manifest,
            settings.criu,
            settings.work_dir,
            session.progress,
            session._on_report,
            session.on_rank_ended,
            settings.gpus,
            settings.staging_bytes,
            self._life.loader,
        )

    def _wake(self, worker_group: Any, session: Session, manifest: Manifest) -> None:
        """Give restored ranks their store and communication, and let them go on."""
        assert session.node is not None
        key = f"torchmig/filled/{session.meeting.generation}"
        if session.is_coordinator:
            self._fill_store(session.place, manifest)
            worker_group.store.set(key, "yes")
        else:
            worker_group.store.get(key)
        if session.node.uses_gpus:
            with session.progress.phase("refill"):
                session.node.refill()
        with session.progress.phase("rebuild"):
            where = session.place.to_request(session.meeting.generation, REBUILD_SECONDS)
            session.node.call("build_up", where, REBUILD_SECONDS)
        session.node.release()

    @staticmethod
    def _fill_store(place: Place, manifest: Manifest) -> None:
        timeout = timedelta(seconds=REBUILD_SECONDS)
        connection = dist.TCPStore(
            place.host, place.port, None, False, timeout, wait_for_workers=False
        )
        store = dist.PrefixStore(place.prefix, connection)
        for name, value in manifest.store_keys.items():
            # The binding takes bytes as well as text, whatever its annotation says.
            store.set(name, b64decode(value))  # type: ignore[arg-type]


def _require_one_snapshot(own: str, other: str, node: int) -> None:
    """Refuse where another agent does something else: to each 'latest' is what it has found."""
    if own == other:
        return
    there = f"restores snapshot {other[:8]}" if other else "starts the script"
    here = f"restore snapshot {own[:8]}" if own else "start the script"
    raise SnapshotUnfitError(
        f"cannot {here}: the agent of node {node} {there}; "
        "name one snapshot with '--restore' on every node"
    )


local_elastic_agent_start = local_elastic_agent.start_processes


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Any:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def describe_launch(arguments: Any, nodes: int) -> dict[str, Any]:
    """Return what a snapshot records of the command line, so that a restore needs none."""
    return {
        "script": arguments.training_script,
        "script_args": list(arguments.training_script_args),
        "module": bool(arguments.module),
        "no_python": bool(arguments.no_python),
        "nproc_per_node": str(arguments.nproc_per_node),
        "nnodes": str(nodes),
        "cwd": str(Path.cwd()),
    }
