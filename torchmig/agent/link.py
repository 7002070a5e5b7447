"""The agent's end of a rank's control socket."""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchmig.cut import Order, Report
from torchmig.errors import DeadlineMissedError, TorchmigError

CONNECT_SECONDS = 60.0
LOOK_SECONDS = 0.2


class RankGoneError(TorchmigError):
    """The rank's end of the socket is closed: its process has ended or never came up."""


class RankLink:
    """Listens for one rank, speaks with it, hands its reports on.

    The rank connects, also again after a dump and after a restore. `on_report` and `on_ended` are
    called on the link's own thread.
    """

    def __init__(
        self,
        rank: int,
        path: Path,
        on_report: Callable[[Report], None],
        on_ended: Callable[[int], None],
    ) -> None:
        self.rank = rank
        self.path = path
        self._on_report = on_report
        self._on_ended = on_ended
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._connected = threading.Event()
        self._gone = threading.Event()
        self._send_lock = threading.Lock()
        self._call_lock = threading.Lock()
        self._order_lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._calls = 0
        self._standing: Order | None = None  # for a rank that has not connected yet
        self.ended = False

    def listen(self) -> None:
        """Take the rank's next connection; returns at once."""
        self._close_listener()
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        self.path.chmod(0o600)
        listener.listen(1)
        self._connected.clear()
        self._gone.clear()
        threading.Thread(
            target=self._serve, args=(listener,), name=f"rank {self.rank}", daemon=True
        ).start()

    def wait_connected(
        self, has_ended: Callable[[], bool], timeout_seconds: float = CONNECT_SECONDS
    ) -> None:
        """Wait until the rank has connected.

        Args:
            has_ended: Whether the rank's process has, so that it never will.
            timeout_seconds: How long at the most.

        Raises:
            RankGoneError: Its process has ended.
            DeadlineMissedError: It has not connected in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._connected.wait(LOOK_SECONDS):
            if has_ended():
                raise RankGoneError(f"rank {self.rank} has ended")
            if time.monotonic() > deadline:
                raise DeadlineMissedError(
                    f"rank {self.rank} did not answer within {timeout_seconds:g} s"
                )

    def order(self, order: Order) -> bool:
        """Send an order of the cut; False if the rank will get it only when it has connected.

        Raises:
            RankGoneError: The rank has ended.
        """
        with self._order_lock:
            self._standing = order
            if not self._connected.is_set():
                return False
            self._send_order(order)
            return True

    def _send_order(self, order: Order) -> None:
        head = [order.request, order.serial, int(order.level), int(order.final)]
        lines = [" ".join(map(str, ["order", *head, len(order.targets)]))]
        lines += [f"{key} {target}" for key, target in order.targets.items()]
        self._send("\n".join(lines))

    def release(self) -> None:
        """Let the rank go on.

        Raises:
            RankGoneError: The rank has ended.
        """
        with self._order_lock:
            self._standing = None
            if self._connected.is_set():
                self._send("release")

    def call(self, name: str, request: Any = None, timeout_seconds: float = 60.0) -> Any:
        """Call a function of torchmig.worker.phases in the rank and return its answer.

        Raises:
            TorchmigError: The function has raised; the text is the rank's.
            DeadlineMissedError: No answer in time.
            RankGoneError: The rank has ended.
        """
        with self._call_lock:
            self._calls += 1
            self._send(f"call {self._calls} {name} {json.dumps(request)}")
            answer = self._answer_to(self._calls, name, timeout_seconds)
        if answer is None:
            raise RankGoneError(f"rank {self.rank} ended while it was asked for '{name}'")
        if answer["type"] == "error":
            raise TorchmigError(f"rank {self.rank} failed at '{name}': {answer['message']}")
        return answer.get("value")

    def detach(self, timeout_seconds: float = 10.0) -> None:
        """Make the rank close its socket; it connects again when `listen` is called."""
        self._close_listener()
        self._standing = None
        self._send("detach")
        if not self._gone.wait(timeout_seconds):
            raise DeadlineMissedError(
                f"rank {self.rank} did not close its socket within {timeout_seconds:g} s"
            )

    def close(self) -> None:
        """Give the socket up."""
        self._close_listener()
        if self._socket is not None:
            self._socket.close()

    def _close_listener(self) -> None:
        self.path.unlink(missing_ok=True)
        if self._listener is not None:
            with contextlib.suppress(OSError):  # not listening any more
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept()
            self._listener.close()
            self._listener = None

    def _send(self, text: str) -> None:
        with self._send_lock:
            if self._socket is None or self._gone.is_set():
                raise RankGoneError(f"rank {self.rank} is not connected")
            try:
                self._socket.sendall(text.encode() + b"\n")
            except OSError as error:
                raise RankGoneError(f"rank {self.rank} is gone: {error}") from error

    def _answer_to(self, number: int, name: str, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the answer to a call, None if the rank has gone; late answers are dropped."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineMissedError(
                    f"rank {self.rank} did not answer '{name}' within {timeout_seconds:g} s"
                ) from None
            if answer is not None and answer["number"] == number:
                return answer
            if answer is None and self._gone.is_set():
                return None

    def _serve(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed before anybody came
        with connection, connection.makefile("rb") as lines:
            self._socket = connection
            with contextlib.suppress(ConnectionResetError):  # how the end of a killed rank reads
                for line in lines:
                    self._take(json.loads(line))
        self._gone.set()
        self._answers.put(None)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("type")
        if kind == "hello":
            with self._order_lock:
                self._connected.set()
                if self._standing is not None:
                    self._send_order(self._standing)
        elif kind == "report":
            wire = {**message, "rank": self.rank, "sequence": self._next_sequence()}
            self._on_report(Report.from_wire(wire))
        elif kind == "ended":
            self.ended = True
            self._on_ended(self.rank)
        elif kind in ("result", "error"):
            self._answers.put({"type": kind, **message})

    def _next_sequence(self) -> int:
        # Monotonic over reconnections, which a counter in the rank would not be after a restore.
        self._sequence = max(self._sequence + 1, time.monotonic_ns() // 1000)
        return self._sequence
