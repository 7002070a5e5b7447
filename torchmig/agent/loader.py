"""The agent's side of the process that brings a snapshot while everything else restores.

The process begins before its agent has imported torch, which takes seconds that disks and
processors can make use of, and has an interpreter of its own, whose threads wait for nobody else's.
It brings GPU memory into staging and, if it is told where to, the images of processes into a
folder. What it does is in loading.py.

It is a child of the agent's and ends with it: when its standard input, a socket, is closed. Each
message is one packet in msgpack:

    to it: a `Request`; {"emptied": rank} for each window that a rank has taken; {"closed": rank}
        when it wants no more
    from it: {"snapshot": id, "ranks": […], "lanes": [{"rank": N, "size_bytes": N}…]} together
        with a descriptor of staging for each lane; {"filled": rank} for each window, in order;
        an error's message
    from it, of images: {"brought": bytes}…, then {"images": null} or {"images": an error's message}
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
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgpack

from torchmig.agent.gpu_state import blocks_of
from torchmig.agent.inflow import Arrivals
from torchmig.agent.workfolders import WorkFolder
from torchmig.capture.device.staging import Staging
from torchmig.capture.device.windows import Block, Ring
from torchmig.errors import TorchmigError, from_message
from torchmig.progress import Progress
from torchmig.repo import Advance, Manifest, RankSection

PACKET_BYTES = 1 << 17
PROCESS = "torchmig.agent.loading"
_MOST_RANKS = 128


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
        criu: What `--criu` says, or None.
        work: An empty folder for images, or None if they are not wanted; `Loader` names it.
    """

    depot: Mapping[str, Any]
    reference: str
    job: str | None
    ranks: Sequence[int] | None
    host: str
    staging_bytes: int | None
    criu: str | None = None
    work: str | None = None


@dataclass(frozen=True)
class Loaded:
    """One rank's GPU memory as it comes."""

    blocks: Sequence[Block]
    staging: Staging
    arrivals: Arrivals


class Loader:
    """The agent's side of one process."""

    def __init__(self, request: Request, work: WorkFolder | None = None) -> None:
        """Start the process; nothing is waited for.

        Args:
            request: What it is to load.
            work: An empty folder for images, which is removed with this, or None.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROCESS],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's signals are for the agent
            )
        self.begun = time.monotonic()
        self.work = work
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._of_images: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[int] = set()  # ranks that have not got all
        path = None if work is None else str(work.path)
        self._send(asdict(replace(request, work=path)))
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

    def wait_images(self, advance: Advance) -> None:
        """Return when the images of all ranks are in their folders below `work`.

        Args:
            advance: Told of bytes as they are written.

        Raises:
            TorchmigError: What has gone wrong there.
        """
        while (message := self._of_images.get()) is not None:
            if "brought" in message:
                advance(message["brought"])
            elif message["images"] is None:
                return
            else:
                raise from_message(message["images"])
        raise self._ended()

    def close(self) -> None:
        """End the process and remove its folder; may be called twice."""
        self._process.kill()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self.work is not None and self.work.path.exists():
            self._process.wait()  # or it might write again what is removed here
            self.work.remove()

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
                    self._socket, PACKET_BYTES, _MOST_RANKS, socket.MSG_CMSG_CLOEXEC
                )
                if not packet:
                    break
                message = msgpack.unpackb(packet)
                if message.keys() & {"brought", "images"}:
                    self._of_images.put(message)
                else:
                    self._messages.put((message, fds))
        self._messages.put(None)
        self._of_images.put(None)

    def _next(self) -> "_Message":
        message = self._messages.get()
        if message is None:
            self._messages.put(None)
            raise self._ended()
        if "error" in message[0]:
            raise from_message(message[0])
        return message

    def _ended(self) -> TorchmigError:
        code = self._process.returncode
        return TorchmigError(f"the process that brings the snapshot has ended with {code}")

    def _follow(self, loaded: Mapping[int, Loaded], progress: Progress) -> None:
        """Pass on what comes, until all is there."""
        count = sum(len(each.arrivals) for each in loaded.values())
        size = sum(block.size_bytes for each in loaded.values() for block in each.blocks)
        try:
            with progress.phase("load", size, self.begun) as phase:
                for _ in range(count):
                    message, _ = self._next()
                    phase.advance(loaded[message["filled"]].arrivals.filled())
        except TorchmigError as error:
            for each in loaded.values():
                each.arrivals.fail(error)


_Message = tuple[dict[str, Any], list[int]]
