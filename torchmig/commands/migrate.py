"""``torchmig migrate``: a job moves to other GPUs of this host."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torchmig.agent.control import ask, find_job
from torchmig.commands import Command
from torchmig.commands._jobs import add_request_arguments, question
from torchmig.config import Group
from torchmig.console import Output
from torchmig.errors import UsageError

_PROGRAM = "torchmig-run"


class Migrate(Command):
    """Suspend a running job and restore it here at once, on the GPUs named.

    The job's torchmig-run ends with 85; this program takes its place and ends with the job. Of the
    options of torchmig-run those count that are in the environment or in the configuration file.
    """

    groups = (Group.JOB,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the job, the GPUs and the deadline."""
        add_request_arguments(parser)
        parser.add_argument(
            "--gpus",
            metavar="LIST",
            help="the GPUs to restore onto, by index or UUID in the order of the ranks; "
            "the same ones as before when left out",
        )

    def run(self, options: argparse.Namespace) -> int | None:
        """Suspend, then become the torchmig-run that restores."""
        path = find_job(Path(options.runtime_dir), options.job)
        status = ask(path, {"do": "status"})
        # Whatever would keep the job from coming back is found while it still runs.
        if status["nodes"] > 1:
            raise UsageError(
                f"cannot migrate job '{status['job']}': it runs on {status['nodes']} nodes; "
                f"use 'torchmig suspend', then '{_PROGRAM} --restore' on each of its nodes"
            )
        if options.gpus is not None:
            from torchmig.capture.device import gpus  # late: NVML's binding is slow to load

            gpus.choose(options.gpus, gpus.list_gpus())
        program = _find_program()
        answer = ask(path, question("suspend", options))
        Output(options.json).document(answer, [f"suspended into {answer['snapshot'][:8]}"])
        sys.stdout.flush()
        os.execv(program, [str(program), *_arguments(status, answer, options)])


def _find_program() -> Path:
    """Return the torchmig-run that is installed with this program."""
    for beside in (sys.argv[0], sys.executable):
        program = Path(beside).absolute().with_name(_PROGRAM)
        if os.access(program, os.X_OK):
            return program
    raise UsageError(
        f"cannot migrate: there is no '{_PROGRAM}' beside '{sys.argv[0]}' or '{sys.executable}'; "
        "install torchmig into the Python that runs it"
    )


def _arguments(
    status: dict[str, Any], answer: dict[str, Any], options: argparse.Namespace
) -> list[str]:
    """Return what torchmig-run needs to find the snapshot, and how it is to speak."""
    values = {
        "restore": answer["snapshot"],
        "repo": status["repo"],
        "local-cache": status["local_cache"],
        "runtime-dir": options.runtime_dir,
        "gpus": options.gpus,
    }
    given = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return given + [f"--{name}" for name in ("json", "quiet", "verbose") if vars(options)[name]]
