"""``torchmig migrate``: a job moves to other GPUs of this host."""

import argparse
import os
import sys
from pathlib import Path

from torchmig.agent.control import ask, find_job
from torchmig.commands import Command
from torchmig.commands._jobs import add_request_arguments
from torchmig.config import Group
from torchmig.console import Output


class Migrate(Command):
    """Suspend a running job and restore it here at once, on the GPUs named.

    The job's torchmig-run ends with 85; this program takes its place and ends with the job.
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
        question = {"do": "suspend"}
        if options.deadline is not None:
            question["deadline_seconds"] = options.deadline
        answer = ask(path, question)
        Output(options.json).document(answer, [f"suspended into {answer['snapshot'][:8]}"])
        program = Path(sys.argv[0]).with_name("torchmig-run")
        arguments = [str(program), f"--restore={answer['snapshot']}", f"--repo={status['repo']}"]
        arguments.append(f"--runtime-dir={options.runtime_dir}")
        if options.gpus is not None:
            arguments.append(f"--gpus={options.gpus}")
        sys.stdout.flush()
        os.execv(program, arguments)
