"""A rank's images go into the repository, and come back, in a process of their own.

Host memory is stored in chunks of 64 KiB. One of them is hashed in 15 microseconds, and threads of
one interpreter that give it up for so short a time spend the rest waiting to have it back: on 16
cores sixteen threads were slower than four. So the ranks of a node do not share an interpreter for
this, nor do they share it with the GPU blocks that are on their way at the same time.

The process is a child of the agent's. It reads one request from its standard input and answers on
its standard output, both in msgpack; a socket is both. It ends when that is closed: with the agent,
whatever becomes of that.

    request: depot, criu, images, prefix, and where they come back: section, snapshot
    answers: {"done": bytes}…, then {"result": …} or an error's message
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack

from torchmig.capture.process import images
from torchmig.criu import Criu
from torchmig.errors import ExitCode, TorchmigError, from_message, to_message
from torchmig.repo import (
    Advance,
    Depot,
    InSteps,
    JobName,
    Manifest,
    RankSection,
    Stream,
    WriterStats,
    unheard,
)

log = logging.getLogger(__name__)

THREADS = 6  # more of one interpreter stand in each other's way
FEWEST_CORES = 4  # below there is nothing to win
SMALLEST_BYTES = 256 << 20  # of images; for fewer the start of a process takes longer
_READ_BYTES = 1 << 16


def pays(size_bytes: int) -> bool:
    """Return whether a process of its own is faster for a rank's images of this size."""
    return size_bytes >= SMALLEST_BYTES and len(os.sched_getaffinity(0)) >= FEWEST_CORES


def store_images(
    depot: Depot, criu: Criu, folder: Path, prefix: str
) -> tuple[list[Stream], WriterStats]:
    """Write all images of a dump into the repository, as `images.store_images` does.

    Returns:
        The streams, and what went through the writer.

    Raises:
        TorchmigError: As it has been raised there.
    """
    result = _ask(_request(depot, criu, folder, prefix), unheard)
    streams = [Stream.from_dict(item) for item in result["streams"]]
    return streams, WriterStats(**result["stats"])


def restore_images(
    depot: Depot,
    criu: Criu,
    snapshot: str,
    section: RankSection,
    prefix: str,
    folder: Path,
    advance: Advance,
) -> None:
    """Write a rank's images back into an empty folder, as `images.restore_images` does.

    Args:
        depot: Where the snapshot is.
        criu: The CRIU whose images they are.
        snapshot: Its id, for messages.
        section: The rank's.
        prefix: What the names of its streams begin with.
        folder: Takes the images.
        advance: Told of bytes as they are written.

    Raises:
        TorchmigError: As it has been raised there.
    """
    request = _request(depot, criu, folder, prefix)
    _ask({**request, "section": section.to_dict(), "snapshot": snapshot}, advance)


def _request(depot: Depot, criu: Criu, folder: Path, prefix: str) -> dict[str, Any]:
    """Return what `_tools` reads."""
    return {
        "depot": depot.to_dict(),
        "criu": {
            "path": str(criu.path),
            "version": criu.version,
            "pycriu_folder": str(criu.pycriu_folder),
        },
        "images": str(folder),
        "prefix": prefix,
    }


def _ask(request: dict[str, Any], advance: Advance) -> dict[str, Any]:
    """Start the process, pass on how far it is, and return its result."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,  # a terminal's signals are for the agent
            )
        with process:
            try:
                ours.sendall(msgpack.packb(request))
                for answer in _messages(ours.fileno()):
                    if "done" in answer:
                        advance(answer["done"])
                    elif "error" in answer:
                        raise from_message(answer)
                    else:
                        return dict(answer["result"])
            except ConnectionError as error:
                log.debug("it has ended early: %s", error)
            finally:
                process.kill()
    raise TorchmigError(
        f"the process that had to do with the images in '{request['images']}' has ended with "
        f"{process.returncode}"
    )


def _messages(descriptor: int) -> Iterator[dict[str, Any]]:
    """Yield what arrives, as soon as it does."""
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    while data := os.read(descriptor, _READ_BYTES):
        unpacker.feed(data)
        yield from unpacker


def main() -> None:
    """Do what standard input asks for."""
    request = next(_messages(sys.stdin.fileno()), None)
    if request is None:
        return
    threading.Thread(target=_end_with_agent, daemon=True).start()
    answer: dict[str, Any]
    try:
        answer = {"result": _restore(request) if "section" in request else _store(request)}
    except Exception as error:
        if not isinstance(error, TorchmigError):
            log.exception("images in '%s'", request["images"])
        answer = to_message(error)
    _say(answer)


def _end_with_agent() -> None:
    while os.read(sys.stdin.fileno(), _READ_BYTES):
        pass
    os._exit(ExitCode.FAILED)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgpack.packb(answer))
    sys.stdout.buffer.flush()


def _tools(request: dict[str, Any]) -> tuple[Depot, Criu, Path, str]:
    named = request["criu"]
    criu = Criu(Path(named["path"]), named["version"], Path(named["pycriu_folder"]))
    return Depot.from_dict(request["depot"]), criu, Path(request["images"]), request["prefix"]


def _store(request: dict[str, Any]) -> dict[str, Any]:
    depot, criu, folder, prefix = _tools(request)
    with depot.writing(threads=THREADS) as writer:
        streams = images.store_images(criu, writer, folder, prefix)
    return {"streams": [stream.to_dict() for stream in streams], "stats": asdict(writer.stats)}


def _restore(request: dict[str, Any]) -> dict[str, Any]:
    depot, criu, folder, prefix = _tools(request)
    section = RankSection.from_dict(request["section"])
    # What a reader needs to know of a snapshot: its name, for messages.
    manifest = Manifest(JobName(""), "", ranks=[section], id=request["snapshot"])

    done = InSteps(lambda size_bytes: _say({"done": size_bytes}))
    with depot.reading(manifest, done.add, threads=THREADS) as reader:
        images.restore_images(criu, reader, section.streams, prefix, folder)
    done.close()
    return {}


if __name__ == "__main__":
    main()
