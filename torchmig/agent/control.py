"""The unix socket through which `torchmig ps`, `checkpoint` and `suspend` reach an agent."""

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchmig.errors import TorchmigError, UsageError, from_message, to_message

log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], dict[str, Any]]
STATUS_SECONDS = 5.0


class ControlServer:
    """Listens for one job of one agent; each connection is one request and one answer."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path = path
        self._handler = handler
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(8)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not listening any more
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Whoever asked may have gone: then there is nobody to answer, also not when closing.
        with contextlib.suppress(OSError), connection, connection.makefile("rwb") as stream:
            line = stream.readline()
            if not line:
                return  # looked whether somebody listens, and asked nothing
            stream.write(json.dumps(self._answer(line)).encode() + b"\n")
            stream.flush()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return self._handler(json.loads(line))
        except (ValueError, KeyError) as error:
            return to_message(UsageError(f"not a request: {error}"))
        except Exception as error:
            if not isinstance(error, TorchmigError):
                log.exception("a request failed: %s", line.decode(errors="replace").strip())
            return to_message(error)


def ask(path: Path, request: dict[str, Any], timeout_seconds: float | None = None) -> Any:
    """Send a request to an agent and return its answer.

    Raises:
        TorchmigError: The agent says no.
        OSError: No agent listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_seconds)
        connection.connect(str(path))
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
            line = stream.readline()
    if not line:
        raise TorchmigError("the agent ended before it answered")
    answer = json.loads(line)
    if "error" in answer:
        raise from_message(answer)
    return answer


def agents(runtime_dir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the socket and status of every agent that runs on this host."""
    for path in sorted(runtime_dir.glob("*/agent-*.sock")):
        try:
            yield path, ask(path, {"do": "status"}, STATUS_SECONDS)
        except OSError:
            continue  # its agent was killed: the socket is left over


def find_job(runtime_dir: Path, job: str) -> Path:
    """Return the socket of an agent of the job, the coordinator's if it is on this host.

    Raises:
        UsageError: No such job runs here, or several names begin so.
    """
    found: dict[str, Path] = {}
    for path, status in agents(runtime_dir):
        name = status["job"]
        if name == job:
            return path
        if name.startswith(job):
            found.setdefault(name, path)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise UsageError(
            f"no job '{job}' runs on this host under '{runtime_dir}'; see 'torchmig ps'"
        )
    raise UsageError(f"job '{job}' is ambiguous: {', '.join(sorted(found))}; write more of it")


def socket_path(runtime_dir: Path, job: str) -> Path:
    """Return where this agent listens for a job."""
    return runtime_dir / job / f"agent-{os.getpid()}.sock"
