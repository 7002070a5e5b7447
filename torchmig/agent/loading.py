"""The process that brings a snapshot; loader.py is the agent's side of it, and has the messages."""

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from torchmig.agent.fillers import THREADS, in_processes
from torchmig.agent.gpu_state import blocks_of, uses_gpus
from torchmig.agent.inflow import Inflow, Lane
from torchmig.agent.loader import PACKET_BYTES, Request
from torchmig.capture.device.blocks import StoredBlocks
from torchmig.capture.device.staging import default_size, require_room
from torchmig.capture.device.windows import Block, Ring
from torchmig.capture.process.fetch import fetch_images
from torchmig.criu import find_criu
from torchmig.errors import ExitCode, to_message
from torchmig.repo import Depot, InSteps, Manifest, RankSection

_MOST_GPU_BYTES = 1 << 40  # of a GPU: what its rank has is not known to be less


def main() -> None:
    """Load what standard input asks for."""
    channel = socket.socket(fileno=sys.stdin.fileno())
    request = channel.recv(PACKET_BYTES)
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
        with ExitStack() as stack:
            try:
                manifest = self._depot.load(self._request.reference, self._request.job)
                sections = self._sections(manifest)
                lanes = self._announce(manifest, sections)
                filling = list(lanes.values())
                brings = []
                if filling:  # or nobody would read
                    reader = stack.enter_context(self._depot.reading(manifest, threads=THREADS))
                    brings = stack.enter_context(in_processes(filling, reader))
            except Exception as error:  # noqa: BLE001 - the agent raises it
                self._fail(error)
                return
            images = threading.Thread(target=self._bring_images, args=(manifest, sections))
            images.start()
            if not lanes:
                images.join()
                return
            if brings:  # there may be no blocks
                Inflow(filling, lambda: nullcontext(brings), self._fail).start()
            while packet := self._channel.recv(PACKET_BYTES):
                message = msgpack.unpackb(packet)
                if "emptied" in message:
                    lanes[message["emptied"]].empty()
                else:
                    lanes[message["closed"]].close()

    def _announce(self, manifest: Manifest, sections: Sequence[RankSection]) -> dict[int, Lane]:
        """Tell the agent what comes; return the lane of each rank that has used GPUs."""
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

    def _bring_images(self, manifest: Manifest, sections: Sequence[RankSection]) -> None:
        """Bring the images of processes into the folder that the request names, if it does."""
        if self._request.work is None:
            return
        work = Path(self._request.work)
        brought = InSteps(lambda size_bytes: self._say({"brought": size_bytes}))
        try:
            criu = find_criu(self._request.criu)
            with self._depot.reading(manifest, brought.add) as reader:
                of = (self._depot, criu, manifest.id, sections)
                fetch_images(*of, reader, work, brought.add)
        except Exception as error:  # noqa: BLE001 - the agent raises it
            self._say({"images": to_message(error)})
        else:
            brought.close()
            self._say({"images": None})

    def _fail(self, error: Exception) -> None:
        self._say(to_message(error))

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(ConnectionError):  # the agent has gone; `run` finds that out
            self._channel.send(msgpack.packb(message))


if __name__ == "__main__":
    main()
