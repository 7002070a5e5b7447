"""``torchmig doctor``: can this host checkpoint, and if not, what to do."""

import argparse

from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.errors import ExitCode
from torchmig.host import State, Where, examine


class Doctor(Command):
    """Check whether this host can checkpoint, and say what to do if it cannot.

    Prints a table of state, what was found, and the cure. Ends with 20 if anything has failed.
    """

    groups = (Group.HOST,)

    def run(self, options: argparse.Namespace) -> int | None:
        """Print the table."""
        checks = examine(Where(options.criu, options.work_dir, options.runtime_dir))
        Output(options.json).table(
            ("what", "state", "found", "cure"),
            [(check.name, check.state.value, check.found, check.cure) for check in checks],
            [
                {
                    "what": check.name,
                    "state": check.state.value,
                    "found": check.found,
                    "cure": check.cure,
                }
                for check in checks
            ],
        )
        failed = any(check.state is State.FAILED for check in checks)
        return int(ExitCode.HOST_UNFIT) if failed else None
