"""What the verbs that talk to running jobs share."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from torchmig.agent.control import ask, find_job
from torchmig.console import Output
from torchmig.units import format_duration, format_size, parse_duration

_TIMES = ("t_cut", "t_quiet", "t_release", "t_durable")
_PLACES = {
    "boundary": "at a step boundary",
    "gate": "between two operations",
    "python": "between two lines of Python",
    "store": "waiting for a key in the store",
}


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a request to a job needs."""
    parser.add_argument("job", metavar="JOB", help="name of the job, or the beginning of it")
    parser.add_argument(
        "--deadline",
        type=_duration,
        metavar="TIME",
        help="time until all ranks have to stand at the cut; the job's own when left out",
    )


def request(kind: str, options: argparse.Namespace) -> None:
    """Ask a job for a checkpoint, a suspend or a dry run, wait for it, and print the outcome."""
    answer = ask(find_job(Path(options.runtime_dir), options.job), question(kind, options))
    Output(options.json).document(answer, _lines(answer))


def question(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the request as an agent takes it."""
    if options.deadline is None:
        return {"do": kind}
    return {"do": kind, "deadline_seconds": options.deadline}


def _lines(answer: dict[str, Any]) -> list[str]:
    times, sizes = answer["times"], answer.get("sizes", {})
    shown = ", ".join(f"{name} {format_duration(times[name])}" for name in _TIMES if name in times)
    if "stand" in answer:
        return [f"{_standing(answer['stand'])}: {shown}", "nothing was saved, the job goes on"]
    lines = [f"snapshot {answer['snapshot'][:8]}: {shown}"]
    if "stored_bytes" in sizes and "read_bytes" in sizes:
        stored, read = format_size(sizes["stored_bytes"]), format_size(sizes["read_bytes"])
        lines.append(f"{stored} newly stored of {read}")
    if answer.get("on_node_only"):
        lines.append(f"on this job's nodes only: {answer['on_node_only']}")
    return lines


def _standing(ranks: list[dict[str, Any]]) -> str:
    """Return '6 ranks at a step boundary, 2 between two operations'."""
    counts = Counter(_PLACES.get(rank["place"], rank["place"]) for rank in ranks)
    (place, first), *others = counts.most_common()
    words = [f"{first} rank{'s' if first != 1 else ''} {place}"]
    return ", ".join([*words, *(f"{count} {place}" for place, count in others)])


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
