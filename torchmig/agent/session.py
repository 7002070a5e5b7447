"""A job on one node: what the agent knows between the start of the ranks and their end.

The node with group rank 0 is the coordinator: it alone carries requests out, one at a time.
"""

import contextlib
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchmig.agent import mesh
from torchmig.agent.gpu_places import used_gpus
from torchmig.agent.node import Node, Rank
from torchmig.agent.request import Job, Kind, NodeHandle, Outcome, Place, Request
from torchmig.agent.start import environment
from torchmig.agent.stdio import StdioTail
from torchmig.criu import Criu
from torchmig.cut import Report, State, pack_reports, unpack_reports
from torchmig.errors import RequestWithdrawnError, TorchmigError
from torchmig.progress import Progress
from torchmig.repo import Depot, JobName
from torchmig.together import together

log = logging.getLogger(__name__)

JOIN_SECONDS = 60.0
EXPLAIN_SECONDS = 30.0
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    job: JobName
    depot: Depot  # where snapshots go
    runtime_dir: Path
    work_dir: str | None
    deadline_seconds: float
    launch: dict[str, Any]
    criu: Criu | None
    unfit: str  # why this host cannot checkpoint; empty if it can
    plain: bool = False  # ranks are started by torch itself, without namespaces
    gpus: str | None = None  # where GPU ranks are restored
    staging_bytes: int | None = None  # None: as much as the ranks use on GPUs
    grace_seconds: float | None = None  # how long a suspend may take with its upload
    close_connections: bool = False  # TCP ones that a script has opened, in a restore


@dataclass
class LocalNode:
    """This node as the coordinator sees it."""

    session_node: Node

    @property
    def node(self) -> int:
        """Group rank."""
        return self.session_node.node

    @property
    def host(self) -> str:
        """Name of the host."""
        return self.session_node.host

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the node."""
        return self.session_node.serve(method, arguments)


@dataclass
class RemoteNode:
    """Another node as the coordinator sees it."""

    node: int
    host: str
    channel: mesh.Channel

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the node over the mesh."""
        return self.channel.call(method, **arguments)


@dataclass(frozen=True)
class Meeting:
    """What the coordinator tells the other agents when the ranks start."""

    job: str
    job_id: str
    secret: str
    host: str
    port: int  # of the mesh; 0 with one node
    prefix: str
    generation: str
    snapshot: str  # that all restore; empty where the script is started

    def to_json(self) -> str:
        """Return the form that goes into torchelastic's store."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> "Meeting":
        """Return the meeting that was written so."""
        return cls(**json.loads(text))


@dataclass
class Session:
    """One life of the job's ranks on this node."""

    settings: Settings
    meeting: Meeting
    group_rank: int
    group_world_size: int
    world_size: int
    place: Place
    progress: Progress
    on_suspended: Callable[[Outcome | None], None]
    on_checkpointed: Callable[[Outcome], None]
    node: Node | None = None
    state: str = "running"
    last_snapshot: str = ""
    reports: "queue.Queue[list[Report]]" = field(default_factory=queue.Queue)
    _outgoing: "queue.Queue[Report]" = field(default_factory=queue.Queue)
    _agents: dict[int, RemoteNode] = field(default_factory=dict)
    _joined: threading.Condition = field(default_factory=threading.Condition)
    _gone: threading.Event = field(default_factory=threading.Event)
    _asked: "queue.Queue[tuple[Kind, float, Future[Outcome]]]" = field(default_factory=queue.Queue)
    _server: mesh.Server | None = None
    _channel: mesh.Channel | None = None
    _number: int = 0
    request: Request | None = None
    _idle: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def is_coordinator(self) -> bool:
        """Whether this agent carries requests out."""
        return self.group_rank == 0

    def listen(self) -> int:
        """Make the coordinator's end of the mesh; return its port, 0 where it is not needed."""
        if self.group_world_size == 1:
            return 0
        self._server = mesh.Server(self.meeting.secret, self._on_agent)
        return self._server.port

    def started(self, ranks: list[Rank], stdio: StdioTail) -> None:
        """Take the ranks that have been started."""
        self.node = Node(
            node=self.group_rank,
            host=socket.gethostname(),
            ranks=ranks,
            criu=self.settings.criu,
            unfit=self.settings.unfit,
            work_dir=self.settings.work_dir,
            on_report=self._on_report,
            drain=stdio.drain,
            on_finished=lambda: None if self.is_coordinator else self.on_suspended(None),
            close_connections=self.settings.close_connections,
        )
        self.node.warm_staging(self.settings.staging_bytes)
        if self.is_coordinator:
            threading.Thread(target=self._carry_out, name="requests", daemon=True).start()
        else:
            connection = mesh.connect(
                self.meeting.host,
                self.meeting.port,
                self.meeting.secret,
                self.group_rank,
                socket.gethostname(),
            )
            self._channel = mesh.Channel(
                connection, self.meeting.host, self._serve_coordinator, self._coordinator_gone
            )
            threading.Thread(target=self._send_reports, name="reports", daemon=True).start()

    def ask(self, kind: Kind, deadline_seconds: float | None = None) -> Future[Outcome]:
        """Ask for a checkpoint, a suspend or a dry run; the future ends with it."""
        future: Future[Outcome] = Future()
        deadline = deadline_seconds or self.settings.deadline_seconds
        if self.is_coordinator:
            self._asked.put((kind, deadline, future))
        else:
            threading.Thread(
                target=self._ask_coordinator, args=(kind, deadline, future), daemon=True
            ).start()
        return future

    def status(self) -> dict[str, Any]:
        """Return what `torchmig ps` shows."""
        node = self.node
        return {
            "job": self.meeting.job,
            "node": self.group_rank,
            "nodes": self.group_world_size,
            "world_size": self.world_size,
            "ranks": [rank.rank for rank in node.ranks] if node else [],
            "pids": [rank.process.pid for rank in node.ranks] if node else [],
            "gpus": used_gpus(pid for rank in node.ranks for pid in rank.process.tree())
            if node
            else [],
            "state": self.state,
            "last_snapshot": self.last_snapshot,
            "repo": self.settings.depot.address,
            "local_cache": self.settings.depot.cache,
            "unfit": self.settings.unfit,
        }

    def explain(self) -> str:
        """Return who waits where while a request is pending."""
        if self._channel is not None:
            return str(self._channel.call("explain", timeout_seconds=EXPLAIN_SECONDS))
        request = self.request
        if request is None or request.planner is None:
            return f"no request is pending for job '{self.meeting.job}'"
        text = request.planner.explain(time.monotonic())
        for handle in self._all_nodes():
            for rank, stack in handle.call("stacks"):
                text += f"\n\nrank {rank}:\n{stack}"
        return text

    def close(self) -> None:
        """Give up the connections and the ranks, which the launcher has ended or given up."""
        if self._server is not None:
            self._server.close()
        if self._channel is not None:
            self._channel.close()
        for agent in list(self._agents.values()):
            agent.channel.close()
        if self.node is not None:
            together(Rank.end, self.node.ranks)
        # A request that is on its way back from a rank that has ended has little left to do.
        self._idle.wait(CLOSE_SECONDS)

    def clean(self) -> None:
        """Remove what the ranks, which have ended, leave in the runtime folder."""
        if self.node is None:
            return
        for rank in self.node.ranks:
            rank.folder.remove()
        with contextlib.suppress(OSError):  # not empty: another agent of the job is still here
            self.node.ranks[0].folder.path.parent.rmdir()

    # The coordinator's side.

    def _carry_out(self) -> None:
        while True:
            kind, deadline, future = self._asked.get()
            self.state = kind.value
            try:
                outcome = self._carry_out_one(kind, deadline)
            except TorchmigError as error:
                log.error("%s", error)
                future.set_exception(error)
            except Exception as error:
                log.exception("%s of job '%s' failed", kind, self.meeting.job)
                future.set_exception(error)
            else:
                self.last_snapshot = outcome.snapshot or self.last_snapshot
                future.set_result(outcome)
                if kind is Kind.SUSPEND:
                    self.on_suspended(outcome)
                    return
                if kind is Kind.CHECKPOINT:
                    self.on_checkpointed(outcome)
            self.state = "running"

    def _carry_out_one(self, kind: Kind, deadline_seconds: float) -> Outcome:
        assert self.node is not None
        nodes = self._all_nodes()
        owner = {}
        for handle in nodes:
            for rank in handle.call("members"):
                owner[rank] = handle.node
        self._number += 1
        job = Job(
            name=JobName(self.meeting.job, self.meeting.job_id),
            depot=self.settings.depot,
            grace_seconds=self.settings.grace_seconds,
            world_size=self.world_size,
            nodes=nodes,
            node_of=owner.__getitem__,
            place=self.place,
            launch=self.settings.launch,
            environment=environment(),
            reports=self.reports,
            gone=self._gone,
            deadline_seconds=deadline_seconds,
            progress=self.progress,
        )
        self._idle.clear()
        self.request = Request(job, kind, self._number)
        try:
            return self.request.run()
        finally:
            self.request = None
            self._idle.set()

    def _all_nodes(self) -> list[NodeHandle]:
        assert self.node is not None
        with self._joined:
            everybody = self._joined.wait_for(
                lambda: len(self._agents) == self.group_world_size - 1, JOIN_SECONDS
            )
        if not everybody or self._gone.is_set():
            raise RequestWithdrawnError(
                f"cannot checkpoint job '{self.meeting.job}': only {len(self._agents) + 1} of its "
                f"{self.group_world_size} agents are connected"
            )
        return [LocalNode(self.node), *(self._agents[node] for node in sorted(self._agents))]

    def _on_agent(self, node: int, host: str, connection: socket.socket) -> None:
        def gone() -> None:
            self._gone.set()

        channel = mesh.Channel(connection, host, self._serve_agent, gone)
        with self._joined:
            self._agents[node] = RemoteNode(node, host, channel)
            self._joined.notify_all()

    def _serve_agent(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "reports":
            self.reports.put(unpack_reports(arguments["packed"]))
            return None
        if method == "explain":
            return self.explain()
        if method == "ask":
            asked = self.ask(Kind(arguments["kind"]), arguments["deadline_seconds"])
            return asked.result().answer()
        raise TorchmigError(f"the coordinator does not serve '{method}'")

    # Every agent's side.

    def _on_report(self, report: Report) -> None:
        if self.is_coordinator:
            self.reports.put([report])
        else:
            self._outgoing.put(report)

    def on_rank_ended(self, rank: int) -> None:
        """Take note that a rank's interpreter is about to exit."""
        request = self._number
        self._on_report(Report(rank, request, 0, time.monotonic_ns() // 1000, State.ENDED))

    def _send_reports(self) -> None:
        """Send what has come in together as one message."""
        while True:
            reports = [self._outgoing.get()]
            while not self._outgoing.empty():
                reports.append(self._outgoing.get_nowait())
            if self._channel is None:
                return
            try:
                self._channel.notify("reports", packed=pack_reports(reports))
            except mesh.AgentGoneError:
                return

    def _serve_coordinator(self, method: str, arguments: dict[str, Any]) -> Any:
        assert self.node is not None
        return self.node.serve(method, arguments)

    def _coordinator_gone(self) -> None:
        """Let the ranks go on: what becomes of the job is torchelastic's business."""
        if self.node is not None and not self.node.finished:
            try:
                self.node.walk_back()
                self.node.release()
            except TorchmigError as error:
                log.error("the coordinator is gone, and on the way back: %s", error)

    def _ask_coordinator(self, kind: Kind, deadline: float, future: "Future[Outcome]") -> None:
        assert self._channel is not None
        try:
            answer = self._channel.call("ask", kind=str(kind), deadline_seconds=deadline)
            outcome = Outcome.from_answer(kind, answer)
        except TorchmigError as error:
            log.error("%s", error)
            future.set_exception(error)
        else:
            self.last_snapshot = outcome.snapshot or self.last_snapshot
            future.set_result(outcome)


def new_secret() -> str:
    """Return what an agent must know to join."""
    return secrets.token_hex(16)
