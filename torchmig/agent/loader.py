"""The process that brings a snapshot's GPU memory into staging while everything else restores.

It begins before its agent has imported torch, which takes seconds that disks and processors can
make use of, and has an interpreter of its own, whose threads wait for nobody else's. Packs of what
it does not decode, processes and files, it reads for the page cache, where the repository is in a
folder.

The process is a child of the agent's and ends with it: when its standard input, a socket, is
closed. Each message is one packet in msgpack:

    to it: a `Request`; {"emptied": rank} for each window that a rank has taken
    from it: {"snapshot": id, "ranks": […], "lanes": [{"rank": N, "size_bytes": N}…]} together
        with a descriptor of staging for each lane; {"filled": rank} for each window, in order;
        an error's message
"""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgpack

from torchmig.agent.inflow import Arrivals, Inflow, Lane
from torchmig.capture.device.blocks import StoredBlocks, from_state
from torchmig.capture.device.staging import Staging, default_size, require_room
from torchmig.capture.device.windows import Block, Ring
from torchmig.errors import ExitCode, TorchmigError, from_message, to_message
from torchmig.host import available_bytes
from torchmig.progress import Progress
from torchmig.repo import Depot, Kind, Manifest, RankSection, Repository
from torchmig.repo.readahead import read_ahead

STATE = "gpu"  # key in a rank's section
_PACKET_BYTES = 1 << 17
_MOST_RANKS = 128
_SHARE = 0.5  # of the memory that is available, for the page cache
_MOST_GPU_BYTES = 1 << 40  # of a GPU: what its rank has is not known to be less


@dataclass(frozen=True)
class Request:
    """What is to be loaded.

    Attributes:
        depot: As `Depot.to_dict` gives it.
        reference: Names the snapshot, as for `Depot.load`.
        job: As there.
        ranks: Those of the agent's node, or None if they are not known yet: all if there was one
            node, else those of the node that was on this host, if there was one.
        host: Name of this host.
        staging_bytes: What `--staging` allows all ranks together, or None.
    """

    depot: Mapping[str, Any]
    reference: str
    job: str | None
    ranks: Sequence[int] | None
    host: str
    staging_bytes: int | None


@dataclass(frozen=True)
class Loaded:
    """One rank's GPU memory as it comes."""

    blocks: Sequence[Block]
    staging: Staging
    arrivals: Arrivals


class Loader:
    """The agent's side of one process."""

    def __init__(self, request: Request) -> None:
        """Start the process; nothing is waited for."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's signals are for the agent
            )
        self._begun = time.monotonic()
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[int] = set()  # ranks that have not got all
        self._send(asdict(request))
        threading.Thread(target=self._receive, name="loader", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def loaded(
        self, manifest: Manifest, sections: Sequence[RankSection], progress: Progress
    ) -> dict[int, Loaded]:
        """Return what comes for each rank that has used GPUs, once it is known.

        Args:
            manifest: The snapshot that is restored.
            sections: Of the ranks of this node.
            progress: Told of the loading.

        Raises:
            LookupError: It is another snapshot that is loaded, or it is loaded for other ranks.
            TorchmigError: What has gone wrong there.
        """
        header, fds = self._next()
        stagings = [Staging(os.fstat(fd).st_size, fd) for fd in fds]
        ranks = sorted(section.rank for section in sections)
        if header["snapshot"] != manifest.id or header["ranks"] != ranks:
            for staging in stagings:
                staging.close()
            raise LookupError(header["snapshot"])
        by_rank = {section.rank: section for section in sections}
        loaded = {}
        for lane, staging in zip(header["lanes"], stagings, strict=True):
            rank = lane["rank"]
            blocks = blocks_of(by_rank[rank])
            ring = Ring.lay_out(blocks, lane["size_bytes"])
            arrivals = Arrivals(
                ring,
                on_emptied=lambda rank=rank: self._send({"emptied": rank}),  # type: ignore[misc]
                on_close=lambda rank=rank: self._close_lane(rank),  # type: ignore[misc]
            )
            loaded[rank] = Loaded(blocks, staging, arrivals)
        self._waiting = set(loaded)
        if loaded:
            threading.Thread(target=self._follow, args=(loaded, progress), daemon=True).start()
        return loaded

    def close(self) -> None:
        """End the process; may be called twice."""
        self._process.kill()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _close_lane(self, rank: int) -> None:
        self._send({"closed": rank})
        with self._lock:
            self._waiting.discard(rank)
            if self._waiting:
                return
        self.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it has ended, which `_receive` finds out
            self._socket.send(msgpack.packb(message))

    def _receive(self) -> None:
        """Keep what comes at once: where nobody took it the process would wait."""
        # Reset is what a connection is whose other end has gone without reading all.
        with self._socket, self._process, suppress(ConnectionResetError):
            while True:
                packet, fds, _, _ = socket.recv_fds(
                    self._socket, _PACKET_BYTES, _MOST_RANKS, socket.MSG_CMSG_CLOEXEC
                )
                if not packet:
                    break
                self._messages.put((msgpack.unpackb(packet), fds))
        self._messages.put(None)

    def _next(self) -> "_Message":
        message = self._messages.get()
        if message is None:
            self._messages.put(None)
            code = self._process.returncode
            raise TorchmigError(f"the process that loads GPU memory has ended with {code}")
        if "error" in message[0]:
            raise from_message(message[0])
        return message

    def _follow(self, loaded: Mapping[int, Loaded], progress: Progress) -> None:
        """Pass on what comes, until all is there."""
        count = sum(len(each.arrivals) for each in loaded.values())
        size = sum(block.size_bytes for each in loaded.values() for block in each.blocks)
        try:
            with progress.phase("load", size, self._begun) as phase:
                for _ in range(count):
                    message, _ = self._next()
                    phase.advance(loaded[message["filled"]].arrivals.filled())
        except TorchmigError as error:
            for each in loaded.values():
                each.arrivals.fail(error)


_Message = tuple[dict[str, Any], list[int]]


def blocks_of(section: RankSection) -> list[Block]:
    """Return the GPU blocks that a rank had."""
    state = section.state.get(STATE) or {}
    return from_state(state["blocks"]) if state else []


def uses_gpus(section: RankSection) -> bool:
    """Return whether a rank had GPU state."""
    return bool((section.state.get(STATE) or {}).get("facts", {}).get("devices"))


def main() -> None:
    """Load what standard input asks for."""
    channel = socket.socket(fileno=sys.stdin.fileno())
    request = channel.recv(_PACKET_BYTES)
    if request:
        with suppress(ConnectionResetError):  # the agent has gone without reading all
            _Process(channel, Request(**msgpack.unpackb(request))).run()
    os._exit(ExitCode.OK)  # with whatever its threads are at: nobody wants it any more


class _Process:
    """The process's side."""

    def __init__(self, channel: socket.socket, request: Request) -> None:
        self._channel = channel
        self._request = request
        self._depot = Depot.from_dict(dict(request.depot))

    def run(self) -> None:
        """Load until the agent closes the channel."""
        try:
            lanes = self._begin()
        except Exception as error:  # noqa: BLE001 - the agent raises it
            self._fail(error)
            return
        while lanes and (packet := self._channel.recv(_PACKET_BYTES)):
            message = msgpack.unpackb(packet)
            if "emptied" in message:
                lanes[message["emptied"]].empty()
            else:
                lanes[message["closed"]].close()

    def _begin(self) -> dict[int, Lane]:
        manifest = self._depot.load(self._request.reference, self._request.job)
        sections = self._sections(manifest)
        ahead = threading.Thread(target=self._read_ahead, args=(sections,), daemon=True)
        ahead.start()
        lanes: dict[int, Lane] = {}
        sizes, fds = [], []
        using = [section for section in sections if uses_gpus(section)]
        for section in using:
            blocks = blocks_of(section)
            size = self._size(blocks, len(using))
            ring = Ring.lay_out(blocks, size)
            fd = os.memfd_create("torchmig-staging", os.MFD_CLOEXEC)
            os.ftruncate(fd, ring.size_bytes)
            stored = StoredBlocks(blocks, section.streams, f"rank-{section.rank}/")
            filled = partial(self._say, {"filled": section.rank})
            lanes[section.rank] = Lane(stored, ring, fd, filled)
            sizes.append({"rank": section.rank, "size_bytes": size})
            fds.append(fd)
        header = {
            "snapshot": manifest.id,
            "ranks": sorted(section.rank for section in sections),
            "lanes": sizes,
        }
        socket.send_fds(self._channel, [msgpack.packb(header)], fds)
        reading = partial(self._depot.reading, manifest)
        if lanes:
            Inflow(list(lanes.values()), reading, self._fail).start()
        else:
            ahead.join()
        return lanes

    def _sections(self, manifest: Manifest) -> list[RankSection]:
        """Return those that the request asks for; none where that cannot be said yet."""
        ranks = self._request.ranks
        if ranks is None:
            nodes = manifest.nodes
            if len(nodes) > 1:
                nodes = [node for node in nodes if node["host"] == self._request.host]
            ranks = nodes[0]["ranks"] if len(nodes) == 1 else []
        return [section for section in manifest.ranks if section.rank in ranks]

    def _size(self, blocks: Sequence[Block], ranks: int) -> int:
        limit = self._request.staging_bytes
        if limit is not None:
            return require_room("restore", blocks, 0, limit // ranks)
        return min(require_room("restore", blocks, 0, None), default_size(ranks, _MOST_GPU_BYTES))

    def _read_ahead(self, sections: Sequence[RankSection]) -> None:
        """Read processes and files for the page cache, which a folder has."""
        address = self._depot.first
        if "://" in address and not address.startswith("file:"):
            return
        streams = [stream for section in sections for stream in section.streams]
        others = [stream for stream in streams if stream.kind != Kind.GPU_BLOCK]
        with suppress(TorchmigError), Repository.open(address) as repository:
            read_ahead(repository, others, int(available_bytes() * _SHARE))

    def _fail(self, error: Exception) -> None:
        self._say(to_message(error))

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(ConnectionError):  # the agent has gone; `run` finds that out
            self._channel.send(msgpack.packb(message))


if __name__ == "__main__":
    main()
