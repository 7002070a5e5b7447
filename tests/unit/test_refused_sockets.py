"""Internet sockets of a process are told apart by what a dump can do with them."""

import os
import socket

import pytest

from torchmig.capture.process.descriptors import descriptors
from torchmig.capture.process.refused import find_refused


@pytest.fixture
def refused():
    """What is refused, with the sockets left out that earlier tests have in this process."""
    targets = [target for _, target in descriptors(os.getpid())]
    there = [int(target[8:-1]) for target in targets if target.startswith("socket:[")]

    def refused(*known, **how):
        inodes = [os.fstat(end.fileno()).st_ino for end in known]
        return find_refused([os.getpid()], there + inodes, **how)

    return refused


def test_connections_open_or_half_closed(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as own:
            other, _ = server.accept()
            assert len(refused()) == 2
            (reason,) = refused(other)
            assert f"a TCP connection to 127.0.0.1:{port} that is not torch's" in reason
            other.close()
            assert refused() == [reason]
            assert refused(own) == refused(closes_connections=True) == []


def test_sockets_without_a_peer(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert refused() == []
        (reason,) = refused(takes_sockets=False)
        assert "an internet socket, which this CRIU cannot dump" in reason
        assert refused(server, takes_sockets=False) == []
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("::1", 0))
        assert refused() == []
        assert refused(takes_sockets=False) == [reason]


def test_connections_that_may_close_still_have_to_be_dumped(refused):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        (reason,) = refused(closes_connections=True, takes_sockets=False)
        assert "an internet socket, which this CRIU cannot dump" in reason
