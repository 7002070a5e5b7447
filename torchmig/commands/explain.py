"""``torchmig explain``: who waits where while a request is pending."""

import argparse
from pathlib import Path

from torchmig.agent.control import ask, find_job
from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output


class Explain(Command):
    """Say which rank a pending request waits for: where it is, at which operation, since when.

    Shows the Python stack of each rank's main thread below.
    """

    groups = (Group.JOB,)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the job."""
        parser.add_argument("job", metavar="JOB", help="name of the job, or the beginning of it")

    def run(self, options: argparse.Namespace) -> int | None:
        """Ask the agent and print its answer."""
        answer = ask(find_job(Path(options.runtime_dir), options.job), {"do": "explain"})
        Output(options.json).document(answer, [answer["text"]])
        return None
