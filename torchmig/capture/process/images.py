"""CRIU's images as streams of a repository, and back.

Memory is most of a dump. CRIU writes it as a file of pages and a map from address to page; here the
pages become one sparse stream whose offsets are the addresses, so that memory which has not changed
since the last dump gives the same blobs, whatever was allocated around it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchmig.criu import Criu, load_pycriu
from torchmig.repo import Kind, Mapping, Reader, Stream, Writer

PAGE_BYTES = 4096
IMAGES = "images/"
PAGES = "pages/"
_IN_PARENT = 1 << 0
_NOT_IMAGES = {"dump.log", "restore.log", "stats-dump", "stats-restore"}


def store_images(criu: Criu, writer: Writer, folder: Path, prefix: str) -> list[Stream]:
    """Write all images of a dump into the repository, names below `prefix`."""
    streams = []
    for path in sorted(folder.iterdir()):
        if path.name in _NOT_IMAGES or path.name.startswith("pages-"):
            continue
        stream = writer.stream(f"{prefix}{IMAGES}{path.name}", Kind.CRIU_IMAGE)
        stream.write(0, path.read_bytes())
        streams.append(stream.close(path.stat().st_size))
        if path.name.startswith("pagemap-"):
            streams.append(_store_pages(criu, writer, path, prefix))
    return streams


def image_bytes(streams: list[Stream], prefix: str) -> int:
    """Return how much the images of a rank hold, without the holes in its memory."""
    ours = (prefix + IMAGES, prefix + PAGES)
    return sum(stream.data_bytes for stream in streams if stream.name.startswith(ours))


def restore_images(
    criu: Criu, reader: Reader, streams: list[Stream], prefix: str, folder: Path
) -> None:
    """Write the images back, as CRIU wrote them, into an empty folder."""
    pages = {}
    for stream in streams:
        if stream.name.startswith(prefix + IMAGES):
            name = stream.name.removeprefix(prefix + IMAGES)
            reader.restore(stream, folder / Path(name).name)
        elif stream.name.startswith(prefix + PAGES):
            pages[stream.name.removeprefix(prefix + PAGES)] = stream
    for name, stream in pages.items():
        pages_id, runs = _read_pagemap(criu, folder / Path(name).name)
        mapping = []
        target = 0
        for address, size in runs:
            mapping.append(Mapping(address, size, target))
            target += size
        path = folder / f"pages-{pages_id}.img"
        with path.open("xb") as file:
            path.chmod(0o600)
            file.truncate(target)
            # In the order of stream offsets; shared memory may be mapped in another.
            reader.restore(stream, file.fileno(), sorted(mapping))


def _store_pages(criu: Criu, writer: Writer, pagemap: Path, prefix: str) -> Stream:
    pages_id, runs = _read_pagemap(criu, pagemap)
    stream = writer.stream(f"{prefix}{PAGES}{pagemap.name}", Kind.HOST_PAGES)
    with (pagemap.parent / f"pages-{pages_id}.img").open("rb") as file:
        start = 0
        for address, size in runs:
            stream.write_file(address, file.fileno(), start, size)
            start += size
        return stream.close()


def _read_pagemap(criu: Criu, path: Path) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of the pages file and (address, bytes) in the order of that file."""
    load_pycriu(criu)
    import pycriu.images

    with path.open("rb") as file:
        entries: list[dict[str, Any]] = pycriu.images.load(file)["entries"]
    return entries[0]["pages_id"], list(_runs(entries[1:]))


def _runs(entries: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    for entry in entries:
        flags = entry.get("flags", 0)
        if flags & _IN_PARENT if isinstance(flags, int) else "PE_PARENT" in str(flags):
            continue  # never written here: pre-dumps are not used
        # Since 4.2 what was nr_pages is compat_nr_pages, which it reads and does not write.
        pages = entry.get("nr_pages") or entry["compat_nr_pages"]
        yield int(entry["vaddr"]), int(pages) * PAGE_BYTES
