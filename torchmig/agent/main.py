"""torchmig-run: torchrun's command line, on jobs that can be suspended, moved and resumed."""

import argparse
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import record

from torchmig.agent.command_line import PROGRAM, load, make_settings, parse, take_over
from torchmig.agent.control import ControlServer, socket_path
from torchmig.agent.elastic import Agent, Life, SuspendedError
from torchmig.agent.loader import Loader
from torchmig.agent.request import Kind, Outcome
from torchmig.agent.session import Session, Settings
from torchmig.console import run_program
from torchmig.errors import ExitCode, HostUnfitError, TorchmigError, UsageError
from torchmig.progress import make_progress
from torchmig.units import format_size

log = logging.getLogger("torchmig")


def main(argv: list[str] | None = None, loader: Loader | None = None) -> int:
    """Run the program and return its exit code.

    Args:
        argv: Its arguments; by default the process's.
        loader: Loads what these arguments restore, as far as that could be said beforehand.
    """
    gc.freeze()  # at the end the collector would go through all of torch, a third of a second
    program = Program(loader)
    given = sys.argv[1:] if argv is None else argv
    return run_program(lambda: program.run(given), PROGRAM, program.arguments)


class Program:
    """One run of the command line."""

    def __init__(self, loader: Loader | None) -> None:
        self.begun = time.monotonic()
        self.loader = loader
        self.arguments = argparse.Namespace()
        self.session: Session | None = None
        self.control: ControlServer | None = None
        self.life: Life | None = None
        self.settings: Settings | None = None

    def run(self, argv: list[str]) -> int:
        """Run the job; return 0 or 85, or raise as torchrun does."""
        arguments = self.arguments
        parse(argv, arguments)
        level = logging.DEBUG if arguments.verbose else logging.INFO
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(message)s"))
        logging.getLogger("torchmig").addHandler(handler)
        logging.getLogger("torchmig").setLevel(logging.ERROR if arguments.quiet else level)
        manifest = load(arguments) if arguments.restore is not None else None
        if manifest is not None:
            take_over(arguments, manifest)
        elif self.loader is not None:
            self.loader.close()  # it was the script's own option that asked for a restore
        settings = self.settings = make_settings(arguments)
        if manifest is not None and settings.unfit:
            raise HostUnfitError(f"cannot restore snapshot {manifest.id[:8]}: {settings.unfit}")
        life = self.life = Life(
            settings=settings,
            restore=manifest,
            progress=make_progress(arguments.json, arguments.quiet),
            loader=self.loader,
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
        if request["do"] in set(Kind):
            kind = Kind(request["do"])
            return session.ask(kind, request.get("deadline_seconds")).result().answer()
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
            "gpus": [],
            "state": "running",
            "last_snapshot": "",
            "repo": settings.depot.address,
            "local_cache": settings.depot.cache,
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
            {"event": event, **outcome.answer()},
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


if __name__ == "__main__":
    sys.exit(main())
