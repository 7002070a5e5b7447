"""A TCP proxy in front of a real server that can refuse, break, delay and answer 503."""

import contextlib
import socket
import struct
import threading
from urllib.parse import urlsplit

_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\n"
    b"Content-Length: 101\r\nConnection: close\r\n\r\n"
    + b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>".ljust(101)
)


class FaultProxy:
    """Forwards connections; faults are set as attributes and count down as they strike."""

    def __init__(self, endpoint_url, port=0):
        parts = urlsplit(endpoint_url)
        self._upstream = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.unavailable = 0  # this many connections are answered with 503
        self.break_up = 0  # this many connections are reset after some of the request
        self.break_down = 0  # this many connections are reset after some of the answer
        self.break_after_bytes = 100_000
        self.stalled = threading.Event()  # while set, nothing is forwarded
        self._lock = threading.Lock()
        self._sockets = []
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closed.set()
        self.stalled.clear()
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.close()

    def _take(self, fault):
        with self._lock:
            if getattr(self, fault) > 0:
                setattr(self, fault, getattr(self, fault) - 1)
                return True
            return False

    def _accept(self):
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        self._sockets.append(client)
        if self._take("unavailable"):
            # Read what comes first, so that closing does not reset the answer away.
            client.recv(65536)
            client.sendall(_UNAVAILABLE)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while client.recv(65536):
                    pass
            client.close()
            return
        server = socket.create_connection(self._upstream)
        self._sockets.append(server)
        up = threading.Thread(target=self._pump, args=(client, server, "break_up"), daemon=True)
        up.start()
        self._pump(server, client, "break_down")

    def _pump(self, source, target, fault):
        passed = 0
        try:
            while data := source.recv(65536):
                while self.stalled.is_set() and not self._closed.is_set():
                    self._closed.wait(0.01)
                passed += len(data)
                if passed > self.break_after_bytes and self._take(fault):
                    for each in (source, target):
                        each.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                        each.shutdown(socket.SHUT_RDWR)
                        each.close()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.close()
