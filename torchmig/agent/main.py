"""torchmig-run: torchrun's command line, on jobs that can be suspended, moved and resumed."""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import record

from torchmig.agent.control import ControlServer, socket_path
from torchmig.agent.elastic import Agent, Life, SuspendedError, describe_launch
from torchmig.agent.ranks import RankProcess
from torchmig.agent.request import Kind, Outcome
from torchmig.agent.session import Session, Settings
from torchmig.config import Group, add_options
from torchmig.console import run_program
from torchmig.criu import Criu, find_criu, load_pycriu
from torchmig.errors import (
    ExitCode,
    HostUnfitError,
    SnapshotUnfitError,
    TorchmigError,
    UsageError,
)
from torchmig.progress import make_progress
from torchmig.repo import Depot, JobName, Manifest
from torchmig.units import format_size

log = logging.getLogger("torchmig")

PROGRAM = "torchmig-run"
DEFAULT_REPO = "torchmig-repo"
NO_ARENA = "TORCHMIG_NO_ARENA"
LONGEST_NAME = 48  # the name is part of a socket's path, which the kernel limits


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(lambda: Program(sys.argv[1:] if argv is None else argv).run(), PROGRAM)


class Program:
    """One run of the command line."""

    def __init__(self, argv: list[str]) -> None:
        self.begun = time.monotonic()
        self.arguments = _parse(argv)
        self.progress = make_progress(self.arguments.json, self.arguments.quiet)
        self.session: Session | None = None
        self.control: ControlServer | None = None
        self.life: Life | None = None
        self.settings: Settings | None = None

    def run(self) -> int:
        """Run the job; return 0 or 85, or raise as torchrun does."""
        arguments = self.arguments
        level = logging.DEBUG if arguments.verbose else logging.INFO
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(message)s"))
        logging.getLogger("torchmig").addHandler(handler)
        logging.getLogger("torchmig").setLevel(logging.ERROR if arguments.quiet else level)
        manifest = _load(arguments) if arguments.restore is not None else None
        if manifest is not None:
            _take_command_line(arguments, manifest)
        settings = self.settings = _settings(arguments)
        if manifest is not None and settings.unfit:
            raise HostUnfitError(f"cannot restore snapshot {manifest.id[:8]}: {settings.unfit}")
        life = self.life = Life(
            settings=settings,
            restore=manifest,
            progress=self.progress,
            on_session=self._on_session,
            on_restored=self._on_restored,
            on_checkpointed=lambda outcome: self._report(outcome, "checkpointed"),
        )
        launcher.LocalElasticAgent = lambda **options: Agent(life, **options)  # type: ignore[assignment,misc]
        self._take_signals()
        try:
            if settings.plain:
                self._refuse_requests(settings)
            record(_run_torchrun)(arguments)
        except SuspendedError:
            return self._suspended(life.outcome)
        finally:
            if self.control is not None:
                self.control.close()
            if self.session is not None:
                self.session.close()
                self.session.clean()
        return ExitCode.OK

    def _take_signals(self) -> None:
        arguments = self.arguments
        torchruns = {name.strip() for name in arguments.signals_to_handle.split(",")}
        for number, kind in (
            (arguments.checkpoint_signal, Kind.CHECKPOINT),
            (arguments.suspend_signal, Kind.SUSPEND),
        ):
            if signal.Signals(number).name in torchruns:
                log.warning(
                    "%s goes to the ranks because of '--signals-to-handle'; ask for a %s with "
                    "'torchmig %s' or another signal",
                    signal.Signals(number).name,
                    kind,
                    kind,
                )
                continue

            def asked(_number: int, _frame: FrameType | None, kind: Kind = kind) -> None:
                self._ask(kind)

            signal.signal(number, asked)

    def _ask(self, kind: Kind) -> None:
        if self.session is None:
            log.warning("%s refused: %s", kind, self._why_not)
            return
        self.session.ask(kind)

    @property
    def _why_not(self) -> str:
        """Why there is nobody to carry a request out."""
        if self.settings is not None and self.settings.plain:
            return self.settings.unfit
        return "the ranks have not been started yet"

    def _refuse_requests(self, settings: Settings) -> None:
        """Say once that this job cannot be checkpointed, and again to whoever asks for it."""
        log.warning("this job cannot be checkpointed: %s", settings.unfit)
        path = socket_path(settings.runtime_dir, settings.job.name)
        try:
            self.control = ControlServer(path, self._serve)
        except OSError as error:
            log.warning("'torchmig ps' will not show this job: '%s': %s", path, error.strerror)

    def _on_session(self, session: Session) -> None:
        first = self.session is None
        self.session = session
        if self.control is not None:
            self.control.close()
        path = socket_path(Path(session.settings.runtime_dir), session.meeting.job)
        self.control = ControlServer(path, self._serve)
        if session.settings.unfit:
            log.warning("this job cannot be checkpointed: %s", session.settings.unfit)
        if first and session.is_coordinator and self.arguments.checkpoint_every:
            threading.Thread(target=self._every, daemon=True, name="timer").start()
        if self.arguments.term_action == "suspend":
            signal.signal(signal.SIGTERM, self._on_term)

    def _every(self) -> None:
        while True:
            time.sleep(self.arguments.checkpoint_every)
            if self.session is not None:
                future = self.session.ask(Kind.CHECKPOINT)
                future.exception()  # logged already; the next one is tried all the same

    def _on_term(self, number: int, _frame: FrameType | None) -> None:
        """Suspend instead of ending; a second signal, or a failure, ends as torchrun does."""
        signal.signal(signal.SIGTERM, _end_as_torchrun)
        session = self.session
        if session is None:
            _end_as_torchrun(number, None)
            return
        future = session.ask(Kind.SUSPEND, self.arguments.grace)
        future.add_done_callback(
            lambda done: os.kill(os.getpid(), signal.SIGTERM) if done.exception() else None
        )

    def _on_restored(self) -> None:
        seconds = time.monotonic() - self.begun
        self._summary(
            f"restored from snapshot {self._restored_id[:8]} in {seconds:.2f} s",
            {"event": "restored", "snapshot": self._restored_id, "t_resume": seconds},
        )

    @property
    def _restored_id(self) -> str:
        return str(self.arguments.restored_id)

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        session = self.session
        if session is None and self.settings is not None and self.settings.plain:
            return self._serve_plain(request, self.settings)
        if session is None:
            raise TorchmigError(self._why_not)
        if request["do"] == "status":
            return {**session.status(), "pid": os.getpid()}
        if request["do"] == "explain":
            return {"text": session.explain()}
        if request["do"] in (Kind.CHECKPOINT, Kind.SUSPEND):
            kind = Kind(request["do"])
            outcome = session.ask(kind, request.get("deadline_seconds")).result()
            return {"snapshot": outcome.snapshot, "times": outcome.times, "sizes": outcome.sizes}
        raise UsageError(f"agents know no request '{request['do']}'")

    def _serve_plain(self, request: dict[str, Any], settings: Settings) -> dict[str, Any]:
        if request["do"] != "status":
            raise HostUnfitError(
                f"job '{settings.job.name}' cannot be checkpointed: {self._why_not}"
            )
        return {
            "job": settings.job.name,
            "pid": os.getpid(),
            "node": 0,
            "nodes": 1,
            "world_size": 0,
            "ranks": [],
            "pids": [],
            "state": "running",
            "last_snapshot": "",
            "repo": settings.repo,
            "unfit": settings.unfit,
        }

    def _suspended(self, outcome: Outcome | None) -> int:
        if outcome is None:  # the coordinator, elsewhere, knows the rest
            self._summary("suspended", {"event": "suspended"})
        else:
            self._report(outcome, "suspended")
        return ExitCode.SUSPENDED

    def _report(self, outcome: Outcome, event: str) -> None:
        names = ("t_cut", "t_gpu_free", "t_release", "t_durable", "t_uploaded", "stall")
        times = ", ".join(
            f"{name} {outcome.times[name]:.2f} s" for name in names if name in outcome.times
        )
        stored, read = outcome.sizes["stored_bytes"], outcome.sizes["read_bytes"]
        self._summary(
            f"{event} into snapshot {outcome.snapshot[:8]}: {times}, "
            f"{format_size(stored)} stored of {format_size(read)}"
            + (", on this job's nodes only" if outcome.on_node_only else ""),
            {
                "event": event,
                "snapshot": outcome.snapshot,
                "times": outcome.times,
                "sizes": outcome.sizes,
                "on_node_only": outcome.on_node_only,
            },
        )

    def _summary(self, text: str, document: dict[str, Any]) -> None:
        if self.arguments.json:
            print(json.dumps({"message_type": "summary", **document}), file=sys.stderr, flush=True)
        elif not self.arguments.quiet:
            print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def _end_as_torchrun(number: int, _frame: FrameType | None) -> None:
    sigval = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)


def _run_torchrun(arguments: argparse.Namespace) -> None:
    torchrun.run(arguments)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = torchrun.get_args_parser()
    parser.prog = PROGRAM
    add_options(parser, Group.RUN)
    # Whether a restore is asked for, and so whether these may be left out, is known only after
    # parsing: a `--restore` behind the script is the script's own.
    defaults = {}
    for action in parser._actions:
        if action.dest == "training_script":
            action.nargs = "?"
            action.required = False
        if action.dest in ("nproc_per_node", "nnodes"):
            defaults[action.dest] = action.default
            action.default = os.environ.get(f"PET_{action.dest.upper()}")
    arguments = parser.parse_args(argv)
    if arguments.restore is None:
        if arguments.training_script is None:
            parser.error(
                "the following arguments are required: training_script, training_script_args"
            )
        for name, default in defaults.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, default)
    return arguments


def _load(arguments: argparse.Namespace) -> Manifest:
    depot = Depot(_repo(arguments), _local_cache(arguments), arguments.local_cache_size)
    manifest = depot.load(arguments.restore, arguments.job)
    arguments.restored_id = manifest.id
    return manifest


def _take_command_line(arguments: argparse.Namespace, manifest: Manifest) -> None:
    """Fill what the command line leaves out from the snapshot; refuse what contradicts it."""
    launch = manifest.launch
    script = arguments.training_script
    if script is not None:
        given = [script, *arguments.training_script_args]
        taken = [launch["script"], *launch["script_args"]]
        if given != taken:
            raise UsageError(
                f"cannot restore snapshot {manifest.id[:8]} with the script '{' '.join(given)}': "
                f"it was taken of '{' '.join(taken)}'; leave the script out, or give the same one"
            )
    script_file = Path(launch["cwd"], launch["script"])
    if not (launch["module"] or launch["no_python"] or script_file.is_file()):
        raise SnapshotUnfitError(
            f"cannot restore snapshot {manifest.id[:8]} on this host: its script '{script_file}' "
            "is missing; put it in the same place"
        )
    arguments.training_script = launch["script"]
    arguments.training_script_args = launch["script_args"]
    arguments.module = launch["module"]
    arguments.no_python = launch["no_python"]
    for name in ("nnodes", "nproc_per_node"):
        given_number = getattr(arguments, name)
        if given_number is None:
            setattr(arguments, name, str(launch[name]))


def _settings(arguments: argparse.Namespace) -> Settings:
    criu: Criu | None = None
    unfit, plain = "", False
    try:
        _require_own_ranks(arguments)
    except HostUnfitError as error:
        unfit, plain = str(error), True
    else:
        try:
            criu = find_criu(arguments.criu)
            load_pycriu(criu)  # here, because threads that import side by side see it half loaded
        except HostUnfitError as error:
            unfit = str(error)
    name = _job_name(arguments)
    _, nodes = torchrun.parse_min_max_nnodes(str(arguments.nnodes))
    os.environ.pop(NO_ARENA, None)
    if arguments.no_arena:
        os.environ[NO_ARENA] = "1"  # for the library in the ranks
    return Settings(
        job=JobName(name, uuid.uuid4().hex[:12]),
        repo=_repo(arguments),
        runtime_dir=Path(arguments.runtime_dir),
        work_dir=arguments.work_dir,
        deadline_seconds=arguments.deadline,
        launch=describe_launch(arguments, nodes),
        criu=criu,
        unfit=unfit,
        plain=plain,
        gpus=arguments.gpus,
        staging_bytes=arguments.staging,
        local_cache=_local_cache(arguments),
        local_cache_bytes=arguments.local_cache_size,
        grace_seconds=arguments.grace,
    )


def _require_own_ranks(arguments: argparse.Namespace) -> None:
    """Refuse where ranks cannot have namespaces and folders of their own.

    Raises:
        HostUnfitError: They have to be started by torch itself, and cannot be checkpointed.
    """
    if arguments.run_path:
        raise HostUnfitError(
            "cannot checkpoint a script started with '--run-path': leave '--run-path' out"
        )
    if os.geteuid() != 0:
        raise HostUnfitError(
            "cannot make namespaces for ranks: this is not root; run as root, "
            "or see 'torchmig doctor'"
        )
    folder = Path(arguments.runtime_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise HostUnfitError(
            f"cannot make the folder '{folder}' for ranks: {error.strerror}; "
            "name another with '--runtime-dir'"
        ) from error
    RankProcess().kill()  # tried, because what a kernel or a container allows is written nowhere


def _job_name(arguments: argparse.Namespace) -> str:
    name = arguments.job
    if name is None:
        stem = Path(arguments.training_script).stem or "job"
        return f"{stem[: LONGEST_NAME - 7]}-{uuid.uuid4().hex[:6]}"
    # It names a folder, in which a socket lies.
    if "/" in name or name.startswith(".") or len(os.fsencode(name)) > LONGEST_NAME:
        raise UsageError(
            f"'{name}' cannot be the name of a job: write one without '/', not beginning with '.', "
            f"of at most {LONGEST_NAME} bytes"
        )
    return str(name)


def _local_cache(arguments: argparse.Namespace) -> str | None:
    return str(Path(arguments.local_cache).resolve()) if arguments.local_cache else None


def _repo(arguments: argparse.Namespace) -> str:
    return str(arguments.repo or Path(DEFAULT_REPO).resolve())


if __name__ == "__main__":
    sys.exit(main())
