"""Connections of a script itself are refused by name, or are closed in a restore if asked."""

import re
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from running import JOBS, by_rank, snapshots, unbroken
from running import ForkedRun as Run

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

STEPS = "150"


class Server(ThreadingHTTPServer):
    """Answers requests; counts the connections that it has had."""

    daemon_threads = True

    class RequestHandlerClass(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            answer = str(int(self.path[1:]) % 7).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        self.connections = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def process_request(self, request, client_address):
        self.connections += 1
        super().process_request(request, client_address)


@pytest.fixture
def server():
    with Server() as server:
        yield server
        server.shutdown()


def script(server):
    return (JOBS / "connected.py", *map(str, server.server_address), STEPS)


def test_a_connection_is_refused_by_name(server, tmp_path):
    run = Run(tmp_path, "--nproc-per-node=1", *script(server))
    run.wait_for_step(5).signal(signal.SIGUSR2)
    said = rf"TCP connection to 127.0.0.1:{server.server_port} that is not .*--close-connections"
    run.wait_for(f"withdrawn, the job goes on: .*{said}").finish()
    assert by_rank(run.text) == unbroken(1, *map(str, script(server)))
    assert snapshots(tmp_path) == []


def was_suspended(run, criu):
    """Suspend, or see that a CRIU that cannot dump sockets on this kernel is named before that."""
    if criu.takes_sockets:
        run.suspend()
    else:
        run.signal(signal.SIGUSR2)
        run.wait_for("withdrawn, the job goes on: .*an internet socket, which this CRIU").kill()
    return criu.takes_sockets


def test_a_connection_is_closed_in_a_restore(server, tmp_path, criu):
    options = ("--nproc-per-node=1", "--close-connections")
    run = Run(tmp_path, *options, *script(server)).wait_for_step(5)
    if was_suspended(run, criu):
        assert server.connections == 1
        again = Run(tmp_path, "--restore=latest").finish()
        assert server.connections == 2
        assert by_rank(run.text, again.text) == unbroken(1, *map(str, script(server)))


def test_a_connection_outlives_a_checkpoint(server, tmp_path, criu):
    if not criu.takes_sockets:
        pytest.skip("needs CRIU 4.2 or Linux before 6.16")
    options = ("--nproc-per-node=1", "--close-connections")
    run = Run(tmp_path, *options, *script(server)).wait_for_step(5)
    run.signal(signal.SIGUSR1).wait_for("checkpointed into snapshot").finish()
    assert server.connections == 1
    assert by_rank(run.text) == unbroken(1, *map(str, script(server)))


def test_a_listening_socket_is_there_again(tmp_path, criu):
    may_end = tmp_path / "may-end"
    run = Run(tmp_path, "--nproc-per-node=1", JOBS / "listening.py", 100, may_end).wait_for_step(5)
    address = ("127.0.0.1", int(re.search(r"listens (\d+)", run.text)[1]))
    assert answer_of(address) == b"here"
    if was_suspended(run, criu):
        with pytest.raises(ConnectionRefusedError):
            answer_of(address)
        again = Run(tmp_path, "--restore=latest").wait_for("restored from snapshot")
        assert answer_of(address) == b"here"
        may_end.touch()
        again.finish()


def answer_of(address):
    with socket.create_connection(address, timeout=20) as connection:
        return connection.recv(4)
