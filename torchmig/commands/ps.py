"""``torchmig ps``: the jobs that run on this host."""

import argparse
from pathlib import Path
from typing import Any

from torchmig.agent.control import agents
from torchmig.commands import Command
from torchmig.config import Group
from torchmig.console import Output
from torchmig.units import format_size


class Ps(Command):
    """List the jobs that run on this host under torchmig-run."""

    groups = (Group.JOB,)

    def run(self, options: argparse.Namespace) -> int | None:
        """Print one line for each agent of this host."""
        running = [status for _, status in agents(Path(options.runtime_dir))]
        rows: list[tuple[str, ...]] = [
            (
                status["job"],
                str(status["pid"]),
                f"{status['node'] + 1} of {status['nodes']}",
                f"{_ranges(status['ranks'])} of {status['world_size']}",
                status["state"] + (", cannot checkpoint" if status["unfit"] else ""),
                (status["last_snapshot"] or "-")[:8],
            )
            for status in running
        ]
        columns: tuple[str, ...] = ("job", "pid", "node", "ranks", "state", "last snapshot")
        if any(status["gpus"] for status in running):
            columns = (*columns, "gpus")
            rows = [
                (*row, _gpus(status["gpus"])) for row, status in zip(rows, running, strict=True)
            ]
        Output(options.json).table(columns, rows, running)
        return None


def _gpus(used: list[dict[str, Any]]) -> str:
    """Return '0,1 (NVIDIA H200), 12.000 GiB in use' for a job's GPUs."""
    if not used:
        return "-"
    names = ", ".join(sorted({gpu["name"] for gpu in used}))
    size = format_size(sum(gpu["used_bytes"] for gpu in used))
    return f"{','.join(str(gpu['index']) for gpu in used)} ({names}), {size} in use"


def _ranges(numbers: list[int]) -> str:
    """Return '0-3,8' for ranks 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"
