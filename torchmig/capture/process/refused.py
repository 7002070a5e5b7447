"""What a process tree holds that CRIU cannot dump, found before anything is frozen."""

from collections.abc import Iterable
from pathlib import Path

from torchmig.capture.process.descriptors import descriptors

ESTABLISHED = "01"
# By what the kernel calls the descriptor.
_REFUSED = {
    "anon_inode:[io_uring]": "an io_uring, which CRIU cannot dump; use another I/O engine, "
    "for libuv programs UV_USE_IO_URING=0",
    "anon_inode:[perf_event]": "a perf event counter; end the profiler first",
    "/dev/infiniband/": "open InfiniBand verbs; start it with NCCL_NET=Socket, to use TCP",
}


def find_refused(
    pids: Iterable[int], torch_sockets: Iterable[int], nccl_sockets: Iterable[int] = ()
) -> list[str]:
    """Return what cannot be dumped, in words, each with what to do.

    Args:
        pids: The tree, as seen here.
        torch_sockets: Inodes of the TCP sockets that are torch's and will be closed.
        nccl_sockets: Of those that are NCCL's and are still there when torch's are closed.
    """
    known = set(torch_sockets)
    foreign = set(nccl_sockets)
    reasons = []
    for pid in pids:
        connections = _connections(pid)
        for _, target in descriptors(pid):
            for prefix, reason in _REFUSED.items():
                if target.startswith(prefix):
                    reasons.append(f"process {pid} has {reason}")
            if target.startswith("socket:["):
                inode = int(target[len("socket:[") : -1])
                if inode in connections and inode in foreign:
                    reasons.append(
                        f"process {pid} has an NCCL communicator (connected to "
                        f"{connections[inode]}) that torch.distributed has not made, and nobody "
                        "could make it anew: destroy it before, or use a process group"
                    )
                elif inode in connections and inode not in known:
                    reasons.append(
                        f"process {pid} has a TCP connection to {connections[inode]} that is not "
                        "torch's: connections cannot be moved to another host, so the script has "
                        "to close it before"
                    )
    return sorted(set(reasons))


def _connections(pid: int) -> dict[int, str]:
    """Return the peer of each established TCP connection in the network namespace of `pid`."""
    peers = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == ESTABLISHED:
                peers[int(fields[9])] = _address(fields[2])
    return peers


def _address(text: str) -> str:
    """Return '10.0.0.1:443' for the kernel's '0100000A:01BB'; of IPv6 only the last four bytes."""
    host, port = text.split(":")
    octets = bytes.fromhex(host[-8:])[::-1]
    return f"{'.'.join(map(str, octets))}:{int(port, 16)}"
