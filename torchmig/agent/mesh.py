"""How the agents of a job speak with each other while a request is carried out.

The coordinator listens; its address and a secret go through torchelastic's store, which all agents
share anyway. One connection an agent, kept open: that it breaks is how the loss of an agent is
known. Messages are msgpack maps behind a length of four bytes.
"""

import contextlib
import hmac
import itertools
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgpack

from torchmig.errors import DeadlineMissedError, TorchmigError, from_message, to_message

log = logging.getLogger(__name__)

Handler = Callable[[str, dict[str, Any]], Any]
MAX_MESSAGE_BYTES = 1 << 30
HELLO_TIMEOUT_SECONDS = 30.0


class AgentGoneError(TorchmigError):
    """The connection to another agent is broken."""


class Channel:
    """One connection; both ends may call and notify. Calls are served on threads of their own."""

    def __init__(
        self, connection: socket.socket, peer: str, handler: Handler, on_close: Callable[[], None]
    ) -> None:
        self.peer = peer
        self._socket = connection
        self._handler = handler
        self._on_close = on_close
        self._send_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.Queue[dict[str, Any] | None]] = {}
        # Notifications are handled one after the other: reports must not overtake each other.
        threading.Thread(target=self._read, name=f"agent {peer}", daemon=True).start()

    def call(self, method: str, timeout_seconds: float | None = None, **arguments: Any) -> Any:
        """Call a method of the other end and return its result.

        Raises:
            TorchmigError: The method has raised it there.
            AgentGoneError: The connection broke.
            DeadlineMissedError: No answer in time.
        """
        number = next(self._numbers)
        answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._waiting[number] = answers
        try:
            self._send({"call": method, "arguments": arguments, "number": number})
            answer = answers.get(timeout=timeout_seconds)
        except queue.Empty:
            raise DeadlineMissedError(
                f"the agent on {self.peer} did not answer '{method}' within {timeout_seconds:g} s"
            ) from None
        finally:
            self._waiting.pop(number, None)
        if answer is None:
            raise AgentGoneError(f"the agent on {self.peer} is gone")
        if "error" in answer:
            raise from_message(answer)
        return answer["result"]

    def notify(self, method: str, **arguments: Any) -> None:
        """Tell the other end something; no answer comes."""
        self._send({"call": method, "arguments": arguments})

    def close(self) -> None:
        """Close; calls under way end with AgentGoneError."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: dict[str, Any]) -> None:
        data = msgpack.packb(message)
        with self._send_lock:
            try:
                self._socket.sendall(struct.pack("!I", len(data)) + data)
            except OSError as error:
                raise AgentGoneError(f"the agent on {self.peer} is gone: {error}") from error

    def _read(self) -> None:
        try:
            while True:
                message = receive(self._socket)
                if "call" not in message:
                    waiting = self._waiting.get(message["number"])
                    if waiting is not None:
                        waiting.put(message)
                elif "number" in message:
                    threading.Thread(target=self._serve, args=(message,), daemon=True).start()
                else:
                    self._handler(message["call"], message["arguments"])
        except (OSError, EOFError, ValueError) as error:
            log.debug("connection to the agent on %s has ended: %s", self.peer, error)
        finally:
            self._socket.close()
            for waiting in list(self._waiting.values()):
                waiting.put(None)
            self._on_close()

    def _serve(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": message["number"]}
        try:
            answer["result"] = self._handler(message["call"], message["arguments"])
        except Exception as error:
            if not isinstance(error, TorchmigError):
                log.exception("'%s' failed", message["call"])
            answer.update(to_message(error))
        try:
            self._send(answer)
        except AgentGoneError as error:
            log.debug("nobody is left to hear the answer: %s", error)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Read one message.

    Raises:
        EOFError: The connection has ended.
        ValueError: What came is no message.
    """
    (size,) = struct.unpack("!I", _exactly(connection, 4))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes is too long")
    message = msgpack.unpackb(_exactly(connection, size), strict_map_key=False)
    if not isinstance(message, dict):
        raise ValueError("a message is no map")
    return message


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


class Server:
    """The coordinator's listening end: accepts the agents that know the secret."""

    def __init__(self, secret: str, on_agent: Callable[[int, str, socket.socket], None]) -> None:
        self._secret = secret
        self._on_agent = on_agent
        self._listener = socket.create_server(("", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="mesh", daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        with contextlib.suppress(OSError):  # not listening any more
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_TIMEOUT_SECONDS)
        try:
            hello = receive(connection)
            secret = str(hello["secret"])
            if not hmac.compare_digest(secret.encode(), self._secret.encode()):
                raise ValueError("wrong secret")
            node, host = int(hello["node"]), str(hello["host"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            log.warning("a connection to the coordinator was refused: %s", error)
            connection.close()
            return
        connection.settimeout(None)
        self._on_agent(node, host, connection)


def connect(host: str, port: int, secret: str, node: int, own_host: str) -> socket.socket:
    """Connect to the coordinator and say who this is.

    Raises:
        AgentGoneError: It cannot be reached.
    """
    try:
        connection = socket.create_connection((host, port), timeout=HELLO_TIMEOUT_SECONDS)
    except OSError as error:
        raise AgentGoneError(
            f"cannot reach the coordinator at {host}:{port}: {error}; "
            "open this port range between the nodes"
        ) from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = msgpack.packb({"secret": secret, "node": node, "host": own_host})
    connection.sendall(struct.pack("!I", len(data)) + data)
    return connection
