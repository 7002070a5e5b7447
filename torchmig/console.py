"""What the programs print: results on standard output, everything else on standard error.

Results are for people or, with ``--json``, one document. A program's outcome becomes an exit code
here and nowhere else, for torchmig and torchmig-run alike.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torchmig.errors import ExitCode, TorchmigError


def run_program(run: Callable[[], int | None], program: str, options: argparse.Namespace) -> int:
    """Call a program's body and return the exit code that its outcome stands for.

    An error is one sentence on standard error, and with ``--json`` a message of type exit_error;
    SIGTERM ends the body like an exception does, so that locks are given back.

    Args:
        run: The body.
        program: The program's name.
        options: Filled by the body; `json` of it counts as soon as it is there.
    """
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(run() or ExitCode.OK)
    except TorchmigError as error:
        print_error(error, program, _wants_json(options))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone, as in `torchmig ls | head`: nothing to say to anybody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FAILED)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wants_json(options: argparse.Namespace) -> bool:
    if "json" in options:
        return bool(options.json)
    # The error is in the environment or in the configuration file, which would say it otherwise.
    return os.environ.get("TORCHMIG_JSON", "") not in ("", "0")


def _terminate(_number: int, _frame: object) -> NoReturn:
    sys.exit(int(ExitCode.TERMINATED))


def print_error(error: TorchmigError, program: str, as_json: bool) -> None:
    """Print an error as one sentence or one JSON line on standard error."""
    if as_json:
        message = {
            "message_type": "exit_error",
            "code": int(error.exit_code),
            "error": type(error).__name__,
            "message": str(error),
        }
        print(json.dumps(message), file=sys.stderr, flush=True)
    else:
        print(f"{program}: {error}", file=sys.stderr, flush=True)


class Output:
    """Results of a verb on standard output."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: Any, lines: Iterable[str]) -> None:
        """Print one result: the value with ``--json``, else the lines."""
        if self.as_json:
            print(json.dumps(value, indent=2), flush=True)
            return
        for line in lines:
            print(line)
        sys.stdout.flush()

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], documents: Sequence[Any]
    ) -> None:
        """Print rows in aligned columns, or the documents as one JSON list."""
        widths = [
            max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)
        ]
        self.document(
            list(documents),
            (
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
                for row in (columns, *rows)
            ),
        )

    def message(self, message_type: str, fields: Mapping[str, Any], line: str | None) -> None:
        """Print one message of a verb that takes long: a JSON line, or the line if there is one."""
        if self.as_json:
            print(json.dumps({"message_type": message_type, **fields}), flush=True)
        elif line is not None:
            print(line, flush=True)


def configure_logging(quiet: bool, verbose: bool) -> None:
    """Send the package's log to standard error; programs call it, the library never does."""
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logging.basicConfig(stream=sys.stderr, format="torchmig: %(levelname)s: %(message)s")
    logging.getLogger("torchmig").setLevel(level)
