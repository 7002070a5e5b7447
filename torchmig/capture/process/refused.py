"""What a process tree holds that CRIU cannot dump, found before anything is frozen."""

from collections.abc import Iterable
from pathlib import Path

from torchmig.capture.process.descriptors import descriptors

# Of TCP sockets that have no peer, or none any more; half closed ones still have theirs.
_STATES_WITHOUT_PEER = ("0A", "07")
# By what the kernel calls the descriptor.
_REFUSED = {
    "anon_inode:[io_uring]": "an io_uring, which CRIU cannot dump; use another I/O engine, "
    "for libuv programs UV_USE_IO_URING=0",
    "anon_inode:[perf_event]": "a perf event counter; end the profiler first",
    "/dev/infiniband/": "open InfiniBand verbs; start it with NCCL_NET=Socket, to use TCP",
}


def find_refused(
    pids: Iterable[int],
    torch_sockets: Iterable[int],
    nccl_sockets: Iterable[int] = (),
    *,
    takes_sockets: bool = True,
    closes_connections: bool = False,
) -> list[str]:
    """Return what cannot be dumped, in words, each with what to do.

    Args:
        pids: The tree, as seen here.
        torch_sockets: Inodes of the TCP sockets that are torch's and will be closed.
        nccl_sockets: Of those that are NCCL's and are still there when torch's are closed.
        takes_sockets: As `Criu.takes_sockets` has it.
        closes_connections: Whether a restore may close the tree's own TCP connections.
    """
    known = set(torch_sockets)
    foreign = set(nccl_sockets)
    reasons = []
    for pid in pids:
        sockets = _internet_sockets(pid)
        for _, target in descriptors(pid):
            for prefix, reason in _REFUSED.items():
                if target.startswith(prefix):
                    reasons.append(f"process {pid} has {reason}")
            if not target.startswith("socket:["):
                continue
            inode = int(target[len("socket:[") : -1])
            peer = sockets.get(inode)
            if peer is None or inode in known:
                continue
            if peer and inode in foreign:
                reasons.append(
                    f"process {pid} has an NCCL communicator (connected to {peer}) that "
                    "torch.distributed has not made, and nobody could make it anew: destroy it "
                    "before, or use a process group"
                )
            elif peer and not closes_connections:
                reasons.append(
                    f"process {pid} has a TCP connection to {peer} that is not torch's: "
                    "connections cannot be moved to another host, so the script has to close it "
                    "before, or, if it can do with a new one, torchmig-run has to be given "
                    "--close-connections"
                )
            elif not takes_sockets:
                reasons.append(
                    f"process {pid} has an internet socket, which this CRIU cannot dump on Linux "
                    "6.16 or newer; install CRIU 4.2"
                )
    return sorted(set(reasons))


def _internet_sockets(pid: int) -> dict[int, str]:
    """Return the TCP and UDP sockets in the network namespace of `pid`.

    By inode, each with its peer if it is a TCP connection, else with an empty text.
    """
    peers = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            is_connection = table.startswith("tcp") and fields[3] not in _STATES_WITHOUT_PEER
            peers[int(fields[9])] = _address(fields[2]) if is_connection else ""
    return peers


def _address(text: str) -> str:
    """Return '10.0.0.1:443' for the kernel's '0100000A:01BB'; of IPv6 only the last four bytes."""
    host, port = text.split(":")
    octets = bytes.fromhex(host[-8:])[::-1]
    return f"{'.'.join(map(str, octets))}:{int(port, 16)}"
