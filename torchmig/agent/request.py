"""One checkpoint or suspend of a whole job, phase by phase, driven by the coordinator.

Each phase has its way back (docs/design.md, section 5): whatever fails, the ranks are brought back
to the cut, their communication is built anew and they go on; the snapshot then does not exist. The
manifest is written last, so a snapshot exists only if everything before has worked.
"""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from torchmig.agent import parted
from torchmig.cut import (
    Pending,
    Planner,
    PlannerOptions,
    RankView,
    Report,
    Withdrawn,
    pack_orders,
    split_orders,
)
from torchmig.errors import (
    DeadlineMissedError,
    HostUnfitError,
    RequestWithdrawnError,
    TorchmigError,
)
from torchmig.progress import Progress
from torchmig.repo import Depot, JobName, Manifest, RankSection, Repository
from torchmig.together import together

log = logging.getLogger(__name__)

TICK_SECONDS = 0.02
QUIET_PAUSE_SECONDS = 0.01
QUIET_SECONDS = 60.0
CLOSING_SECONDS = 2.0  # which a thread of NCCL's might need to close a connection
WALK_BACK_SECONDS = 120.0


class Kind(StrEnum):
    """What is asked for."""

    CHECKPOINT = "checkpoint"  # and go on
    SUSPEND = "suspend"  # and end
    DRY_RUN = "dry-run"  # only stand still together, save nothing, and go on


class NodeHandle(Protocol):
    """A node of the job, this one or another."""

    @property
    def node(self) -> int:
        """Group rank."""

    @property
    def host(self) -> str:
        """Name of the host."""

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of torchmig.agent.node.Node there."""


@dataclass(frozen=True)
class Place:
    """Where ranks find the job's store."""

    host: str
    port: int
    prefix: str  # of the script's keys; empty in a job's first life

    def to_request(self, generation: str, timeout_seconds: float) -> dict[str, Any]:
        """Return what ranks are asked with to build their communication up here.

        Args:
            generation: Not used before in this job.
            timeout_seconds: How long they may wait for each other.
        """
        return {**asdict(self), "generation": generation, "timeout_seconds": timeout_seconds}


@dataclass
class Job:
    """What a request needs to know of the job."""

    name: JobName
    depot: Depot
    grace_seconds: float | None  # how long a suspend may take with its upload
    world_size: int
    nodes: list[NodeHandle]
    node_of: Callable[[int], int]
    place: Place
    launch: dict[str, Any]
    environment: dict[str, Any]
    reports: "queue.Queue[list[Report]]"
    gone: threading.Event  # an agent of the job has been lost
    deadline_seconds: float
    progress: Progress


@dataclass(frozen=True)
class Outcome:
    """What a request has brought."""

    snapshot: str  # its id; empty after a dry run
    kind: Kind
    times: dict[str, float]  # seconds
    sizes: dict[str, int]  # bytes
    on_node_only: str = ""  # why the repository does not have it, if it is in nodes' folders only
    stand: tuple[dict[str, Any], ...] = ()  # of a dry run: where each rank stood

    def answer(self) -> dict[str, Any]:
        """Return what whoever has asked is told; docs/json.md lists it."""
        if self.kind is Kind.DRY_RUN:
            return {"times": self.times, "stand": list(self.stand)}
        return {
            "snapshot": self.snapshot,
            "times": self.times,
            "sizes": self.sizes,
            "on_node_only": self.on_node_only,
        }

    @classmethod
    def from_answer(cls, kind: Kind, answer: dict[str, Any]) -> "Outcome":
        """Return the outcome that another agent was told."""
        return cls(
            snapshot=answer.get("snapshot", ""),
            kind=kind,
            times=answer["times"],
            sizes=answer.get("sizes", {}),
            on_node_only=answer.get("on_node_only", ""),
            stand=tuple(answer.get("stand", ())),
        )


class Request:
    """One run through the phases. `run` may be called once."""

    def __init__(self, job: Job, kind: Kind, number: int) -> None:
        self.job = job
        self.kind = kind
        self.number = number
        self.planner: Planner | None = None
        self._begun = time.monotonic()
        self._times: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._down = False  # whether communication is being taken down
        self._fully_down = False  # on all ranks
        self._parted: list[tuple[str, int]] = []  # groups that are not built anew
        self._keys: dict[str, str] = {}
        self._dumps: list[dict[str, Any]] = []
        self._on_node_only = ""
        self._stand: tuple[dict[str, Any], ...] = ()

    def run(self) -> Outcome:
        """Carry the request out.

        Raises:
            TorchmigError: The request has failed; the job goes on.
        """
        # Held to the very end: the way back may need what has been written already.
        with ExitStack() as held:
            try:
                if self.kind is Kind.DRY_RUN:
                    self._try()
                    snapshot = ""
                else:
                    self.job.depot.prepare()
                    snapshot = self._phases(held)
            except TorchmigError as error:
                back = "the job goes on" if self._walk_back() else "on the way back more failed"
                error.inside(f"{self.kind} of job '{self.job.name.name}' withdrawn, {back}")
                raise
            except BaseException:
                self._walk_back()
                raise
        return Outcome(
            snapshot, self.kind, self._times, self._sizes, self._on_node_only, self._stand
        )

    def _try(self) -> None:
        """Go as far as costs the job nothing but the time that it stands still."""
        self._come_to_rest()
        assert self.planner is not None
        self._stand = tuple(_where(view) for view in self.planner.view())
        self._every("release")
        self._times["stall"] = self._seconds() - self._times["t_cut"]

    def _come_to_rest(self) -> bool:
        """Bring the job to where its state can be taken; return whether it uses GPUs."""
        phase = self.job.progress.phase
        with phase("preflight"):
            use_gpus = any(node["uses_gpu"] for node in self._every("preflight"))
        with phase("cut"):
            self._cut()
            self._times["t_cut"] = self._seconds()
            self._refuse()
        with phase("quiesce"):
            self._wait_for_quiet()
        self._times["t_quiet"] = self._seconds()
        return use_gpus

    def _phases(self, held: ExitStack) -> str:
        phase = self.job.progress.phase
        use_gpus = self._come_to_rest()
        with phase("take down"):
            self._take_down()
        repository: Repository | None = None
        if use_gpus:
            # GPU memory that staging cannot hold is written at once.
            repository = held.enter_context(self.job.depot.holding())
        with phase("capture"):
            self._capture()
        with phase("dump"):
            self._dumps = [rank for node in self._every("dump") for rank in node]
        if self._sizes["gpu_bytes"]:
            self._times["t_gpu_free"] = self._seconds()
        if self.kind is Kind.CHECKPOINT:
            with phase("resume"):
                self._resume()
            # Measured from the stand: before it the slowest rank was still at work.
            self._times["stall"] = self._seconds() - self._times["t_cut"]
        # Held from before the first blob to the commit: no prune comes between the agents' writers
        # and the manifest that refers to what they wrote.
        if repository is None:
            repository = held.enter_context(self.job.depot.holding())
        with phase("store"):
            manifest = self._save()
        with phase("commit"):
            snapshot = repository.commit(manifest)
        if self.job.depot.cache is not None:
            self._upload(manifest)
        with phase("finish"):
            self._every("finish" if self.kind is Kind.SUSPEND else "clean")
        if self.kind is Kind.SUSPEND:
            self._times["t_release"] = self._seconds()
        return snapshot

    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def _cut(self) -> None:
        """Bring all ranks to a stand.

        Raises:
            RequestWithdrawnError: There is none in time, or a rank has ended.
        """
        job = self.job
        options = PlannerOptions(deadline_seconds=job.deadline_seconds)
        planner = self.planner = Planner(job.world_size, self.number, options)
        while not job.reports.empty():
            job.reports.get_nowait()  # of an earlier request
        self._order(planner.start(time.monotonic()))
        while isinstance(planner.verdict, Pending):
            self._check_agents()
            try:
                reports = job.reports.get(timeout=TICK_SECONDS)
                self._order(planner.reports(reports, time.monotonic()))
            except queue.Empty:
                pass
            self._order(planner.tick(time.monotonic()))
        if isinstance(planner.verdict, Withdrawn):
            reason = planner.verdict.reason
            if reason.startswith("no stand within"):
                raise DeadlineMissedError(reason)
            raise RequestWithdrawnError(reason)

    def _order(self, orders: Iterable[tuple[int, Any]]) -> None:
        for node, its in split_orders(orders, self.job.node_of).items():
            handle = next(each for each in self.job.nodes if each.node == node)
            handle.call("orders", packed=pack_orders(its))

    def _refuse(self) -> None:
        """Refuse by name what could not be restored; nothing has been frozen yet."""
        if reasons := self._reasons("refused"):
            raise HostUnfitError(reasons)
        answers = [held for node in self._every("call", name="groups") for _, held in node]
        self._parted = parted.without_peers(tuple(group) for held in answers for group in held)

    def _reasons(self, method: str) -> str:
        """Return what the nodes have against going on, or nothing."""
        return "; ".join(reason for node in self._every(method) for reason in node)

    def _wait_for_quiet(self) -> None:
        """Wait until nothing moves on any rank: all that has been issued is complete."""
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            # A rank's answer covers the time since its last one. All answers of one round are
            # later than all of the round before: if all are yes, there was a moment between the
            # rounds at which nothing moved anywhere, and nothing can start by itself.
            answers = [answer for node in self._every("call", name="moves") for answer in node]
            moving = "; ".join(f"rank {rank}: {what}" for rank, what in answers if what)
            if not moving:
                break
            if time.monotonic() > deadline:
                raise DeadlineMissedError(
                    f"its communication did not come to rest within {QUIET_SECONDS:g} s: {moving}"
                )
            time.sleep(QUIET_PAUSE_SECONDS)

    def _take_down(self) -> None:
        """Save the store and take communication down; nothing moves any more.

        Raises:
            HostUnfitError: Something is still connected; nothing has been frozen yet.
        """
        first = self.job.nodes[0].call("call", name="store_keys")
        self._keys = next((keys for _, keys in first if keys), {})
        self._down = True
        self._every("call", name="mute")
        self._drop_communication()
        deadline = time.monotonic() + CLOSING_SECONDS
        while reasons := self._reasons("left_over"):
            if time.monotonic() > deadline:
                raise HostUnfitError(reasons)
            time.sleep(QUIET_PAUSE_SECONDS)

    def _drop_communication(self) -> None:
        self._every("call", name="take_down", request=self._parted)
        self._fully_down = True

    def _capture(self) -> None:
        """Bring GPU memory into staging; the GPUs are free afterwards."""
        nodes = self._every("capture", depot=self.job.depot.to_dict())
        captured = [rank for node in nodes for rank in node]
        self._sizes["gpu_bytes"] = sum(rank["live_bytes"] for rank in captured)
        for rank in captured:
            for step, seconds in rank["seconds"].items():
                self._times[step] = max(seconds, self._times.get(step, 0.0))

    def _resume(self) -> None:
        """Let dumped or stopped ranks go on in place."""
        self._every("reattach")
        if self._down:
            where = self.job.place.to_request(uuid.uuid4().hex[:12], WALK_BACK_SECONDS)
            self._every("call", name="build_up", request=where, timeout_seconds=WALK_BACK_SECONDS)
            self._down = self._fully_down = False
        self._every("release")

    def _save(self) -> Manifest:
        job = self.job
        saved = self._every("save", depot=job.depot.to_dict())
        sections = [RankSection.from_dict(item) for node in saved for item in node["sections"]]
        sections.sort(key=lambda section: section.rank)
        for name in ("read_bytes", "new_bytes", "duplicate_bytes", "zero_bytes", "stored_bytes"):
            self._sizes[name] = sum(node["stats"][name] for node in saved)
        self._sizes["image_bytes"] = sum(dump["image_bytes"] for dump in self._dumps)
        self._times["criu"] = max(dump["seconds"] for dump in self._dumps)
        self._times["store"] = max(node["seconds"] for node in saved)
        self._times["t_durable"] = self._seconds()
        nodes = [
            {"node": handle.node, "host": handle.host, "ranks": self._ranks_of(handle.node)}
            for handle in job.nodes
        ]
        return Manifest(
            job=job.name,
            kind=str(self.kind),
            launch=job.launch,
            environment=job.environment,
            nodes=nodes,
            ranks=sections,
            store_keys=dict(self._keys),
            report={**self._times, **self._sizes},
        )

    def _upload(self, manifest: Manifest) -> None:
        """Bring a snapshot from the nodes' folders to the repository.

        It is durable already, so that a failure only leaves it where it is, and says so.
        """
        depot = self.job.depot
        deadline = None
        if self.kind is Kind.SUSPEND and self.job.grace_seconds is not None:
            deadline = max(0.0, self.job.grace_seconds - self._seconds())
        with self.job.progress.phase("upload"):
            try:
                wire = depot.to_dict()
                data = manifest.encode()
                self._every("keep", depot=wire, manifest=data)
                with depot.delivering(deadline) as cache:
                    self._every("upload", depot=wire, manifest=data, deadline_seconds=deadline)
                    cache.commit(manifest)
                self._times["t_uploaded"] = self._seconds()
            except TorchmigError as error:
                self._on_node_only = str(error)
                log.error("the snapshot is in the folders of the nodes only: %s", error)

    def _ranks_of(self, node: int) -> list[int]:
        return [rank for rank in range(self.job.world_size) if self.job.node_of(rank) == node]

    def _walk_back(self) -> bool:
        """Bring the job back to work from wherever the request has failed; say if that worked."""
        errors: list[BaseException] = []

        def attempt(step: Callable[[], Any]) -> None:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the other steps are wanted all the more
                errors.append(error)

        if self.planner is not None:
            self.planner.withdraw("the request has failed", time.monotonic())
        attempt(lambda: self._every("walk_back"))
        if self._down:
            if not self._fully_down:  # what is built anew has to be down everywhere
                attempt(self._drop_communication)
            attempt(self._resume)
        else:
            attempt(lambda: self._every("release"))
        attempt(lambda: self._every("clean"))
        for error in errors:
            unforeseen = None if isinstance(error, TorchmigError) else error
            log.error("on the way back: %s", error, exc_info=unforeseen)
        return not errors

    def _check_agents(self) -> None:
        if self.job.gone.is_set():
            raise RequestWithdrawnError("an agent of the job is gone")

    def _every(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all nodes side by side."""
        return together(lambda node: node.call(method, **arguments), self.job.nodes)


def _where(view: RankView) -> dict[str, Any]:
    """Return where a rank stands, for programs."""
    assert view.report is not None
    return {
        "rank": view.rank,
        "place": str(view.report.place),
        "waiting": [str(key) for key in view.report.waiting],
        "asked_at_step": view.asked_at_step,
        "step": view.report.steps,
    }
