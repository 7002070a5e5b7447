"""How far a long operation is, on standard error.

On a terminal a bar for the phase under way; elsewhere one line a phase, with one more every ten
seconds, so that a batch system's log stays readable; with ``--json`` one message a line.
"""

import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from torchmig.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_REPORT_EVERY_SECONDS = 10.0


@dataclass
class Phase:
    """One phase of an operation; any thread may advance it."""

    name: str
    total_bytes: int | None
    reporter: "Progress"
    begun: float
    done_bytes: int = 0

    def advance(self, size_bytes: int) -> None:
        """Count bytes as done."""
        with self.reporter.lock:
            self.done_bytes += size_bytes
            self.reporter.advanced(self)

    @property
    def seconds(self) -> float:
        """Time since the phase began."""
        return time.monotonic() - self.begun

    def summary(self) -> str:
        """Return what was done and how fast, such as '1.582 GiB in 0.84 s (1.883 GiB/s)'."""
        seconds = self.seconds
        if not self.done_bytes:
            return f"in {format_duration(seconds)}"
        rate = format_size(self.done_bytes / max(seconds, 1e-6))
        return f"{format_size(self.done_bytes)} in {format_duration(seconds)} ({rate}/s)"


class Progress(ABC):
    """Reports phases, one after the other or side by side."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lock = threading.RLock()

    @contextmanager
    def phase(
        self, name: str, total_bytes: int | None = None, begun: float | None = None
    ) -> Iterator[Phase]:
        """Report what happens inside the ``with`` block; an exception ends the phase as failed.

        Args:
            name: What it is called.
            total_bytes: How much is to be done, if that is known.
            begun: When it has begun, by the monotonic clock, if that was earlier.
        """
        phase = Phase(name, total_bytes, self, time.monotonic() if begun is None else begun)
        with self.lock:
            self.begun(phase)
        try:
            yield phase
        except BaseException:
            with self.lock:
                self.ended(phase, failed=True)
            raise
        with self.lock:
            self.ended(phase, failed=False)

    @abstractmethod
    def begun(self, phase: Phase) -> None:
        """Take note that a phase begins; the lock is held, as in the two below."""

    @abstractmethod
    def advanced(self, phase: Phase) -> None:
        """Take note that a phase has more bytes done."""

    @abstractmethod
    def ended(self, phase: Phase, *, failed: bool) -> None:
        """Take note that a phase is over."""


def make_progress(as_json: bool, quiet: bool, stream: TextIO | None = None) -> Progress:
    """Return the reporter that fits the options and the stream, by default standard error."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentProgress(stream)
    if as_json:
        return JsonProgress(stream)
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalProgress(stream)
    return LineProgress(stream)


class SilentProgress(Progress):
    """Says nothing."""

    def begun(self, phase: Phase) -> None: ...

    def advanced(self, phase: Phase) -> None: ...

    def ended(self, phase: Phase, *, failed: bool) -> None: ...


class LineProgress(Progress):
    """One line when a phase ends, and one every ten seconds before."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._last_report = time.monotonic()

    def begun(self, phase: Phase) -> None:
        self._last_report = time.monotonic()

    def advanced(self, phase: Phase) -> None:
        if time.monotonic() - self._last_report >= _REPORT_EVERY_SECONDS:
            self._last_report = time.monotonic()
            share = (
                f", {100 * phase.done_bytes // phase.total_bytes} %" if phase.total_bytes else ""
            )
            self._print(f"torchmig: {phase.name}: {phase.summary()}{share}")

    def ended(self, phase: Phase, *, failed: bool) -> None:
        self._print(f"torchmig: {phase.name}: {'failed ' if failed else ''}{phase.summary()}")

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class JsonProgress(Progress):
    """One message of type status when a phase begins, ends, and every ten seconds between."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._last_report = time.monotonic()

    def begun(self, phase: Phase) -> None:
        self._print(phase, "begun")

    def advanced(self, phase: Phase) -> None:
        if time.monotonic() - self._last_report >= _REPORT_EVERY_SECONDS:
            self._print(phase, "running")

    def ended(self, phase: Phase, *, failed: bool) -> None:
        self._print(phase, "failed" if failed else "done")

    def _print(self, phase: Phase, state: str) -> None:
        self._last_report = time.monotonic()
        message: dict[str, Any] = {
            "message_type": "status",
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "phase": phase.name,
            "state": state,
            "seconds": round(phase.seconds, 6),
            "bytes": phase.done_bytes,
        }
        if phase.total_bytes is not None:
            message["total_bytes"] = phase.total_bytes
        print(json.dumps(message), file=self.stream, flush=True)


class TerminalProgress(Progress):
    """A bar for each phase under way, replaced by one line when the phase ends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._bars: RichProgress | None = None
        self._tasks: dict[int, TaskID] = {}

    def begun(self, phase: Phase) -> None:
        if self._bars is None:
            self._bars = _make_bars(self.stream)
            self._bars.start()
        self._tasks[id(phase)] = self._bars.add_task(phase.name, total=phase.total_bytes)

    def advanced(self, phase: Phase) -> None:
        if self._bars is not None:
            self._bars.update(self._tasks[id(phase)], completed=phase.done_bytes)

    def ended(self, phase: Phase, *, failed: bool) -> None:
        if self._bars is None:
            return
        self._bars.remove_task(self._tasks.pop(id(phase)))
        mark = "[red]failed[/red]" if failed else "[green]done[/green]"
        self._bars.console.print(f"{phase.name:<12} {mark} {phase.summary()}", highlight=False)
        if not self._tasks:
            # The bars' own thread and the hidden cursor go with the last phase.
            self._bars.stop()
            self._bars = None


def _make_bars(stream: TextIO) -> "RichProgress":
    # Imported late: only a terminal needs it, and it takes a tenth of a second.
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description:<12}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
