"""A stream on its way into the repository: gathers what is written into pieces worth a task.

Callers write what they have, from a page to many gigabytes. Large writes are hashed in place by
several threads while the caller waits; small ones are copied and hashed later.
"""

import os
from typing import TYPE_CHECKING, NamedTuple

from torchmig.errors import TorchmigError, UsageError
from torchmig.repo.blob import CHUNK_BYTES, Kind
from torchmig.repo.extents import INLINE_EXTENTS, MAX_OFFSET, Extent, check_extents, encode_trees
from torchmig.repo.manifest import Stream, check_stream_name
from torchmig.store import Buffer

if TYPE_CHECKING:
    from torchmig.repo.writer import Writer

# As long as the longest chunk. A task this long makes its queueing costs vanish.
TASK_BYTES = 4 << 20
_DIRECT_BYTES = 8 << 20  # from here on waiting for the hashes is cheaper than a copy


_FILE_TASK_BYTES = 256 << 10  # below this a file is read by the caller


class Segment(NamedTuple):
    """Contiguous bytes of a stream."""

    offset_bytes: int
    data: memoryview


class StreamWriter:
    """One stream, written by one thread at a time.

    Offsets are positions in the stream, up to 2^63, in any order and as sparse as wanted, for
    example the virtual addresses of host pages. What is never written, and chunks that are all
    zero, are holes. Chunk borders lie at multiples of the kind's chunk size, so that equal bytes at
    equal offsets give equal blobs.
    """

    def __init__(self, writer: "Writer", name: str, kind: Kind, mode: int) -> None:
        self.kind = kind
        # Plain tuples of what an Extent has: there may be millions.
        self.extents: list[tuple[int, int, bytes]] = []
        self.submitted = 0
        self.finished: list[None] = []  # appended to by threads, which needs no lock
        self._writer = writer
        self._name = check_stream_name(name)
        self._mode = mode
        self._chunk_bytes = CHUNK_BYTES[kind]
        self._buffer: bytearray | None = None
        self._filled = 0
        self._runs: list[list[int]] = []  # offset and length of what lies in the buffer
        self._next = -1  # the offset at which a write would prolong the last run
        self._end = 0
        self._closed = False

    def write(self, offset_bytes: int, data: Buffer) -> None:
        """Take in bytes; `data` may be reused after return. Nothing may be written twice."""
        view = memoryview(data).cast("B")
        size_bytes = len(view)
        if not size_bytes:
            return
        end = offset_bytes + size_bytes
        if self._closed or offset_bytes < 0 or end > MAX_OFFSET:
            raise UsageError(f"cannot write to stream {self._name!r} at offset {offset_bytes}")
        if end > self._end:
            self._end = end
        if size_bytes >= _DIRECT_BYTES:
            self._write_direct(offset_bytes, view)
            return
        while True:
            room = TASK_BYTES - self._filled
            if size_bytes <= room:
                self._append(offset_bytes, view, size_bytes)
                return
            self._append(offset_bytes, view[:room], room)
            view = view[room:]
            offset_bytes += room
            size_bytes -= room
            self._flush(keep_open_chunk=True)

    def write_file(self, offset_bytes: int, fd: int, start_bytes: int, size_bytes: int) -> None:
        """Take in a part of a file, which the hashing threads read themselves.

        Holes of the file are read like anything else: to find the next one a tmpfs looks at every
        page before it, so that many parts of one file would take time that grows with its square.
        The file must not change and `fd` must stay open until the stream is closed.

        Args:
            offset_bytes: where the bytes belong in the stream.
            fd: a file that can be read at any place.
            start_bytes: where they begin in the file.
            size_bytes: how many there are; a file that ends before is an error.
        """
        self._write_part(offset_bytes, fd, start_bytes, size_bytes)
        self._end = max(self._end, offset_bytes + size_bytes)

    def close(self, size_bytes: int | None = None) -> Stream:
        """End the stream and return what the manifest says of it.

        Args:
            size_bytes: the length of the stream, if it ends with a hole; by default it ends with
                the last byte written.
        """
        self._flush(keep_open_chunk=False)
        self._closed = True
        self._writer.wait_for(self)
        size_bytes = self._end if size_bytes is None else size_bytes
        if size_bytes < self._end:
            raise UsageError(
                f"cannot close stream {self._name!r} at {size_bytes} bytes: "
                f"it has been written up to {self._end}"
            )
        extents = sorted(self.extents)
        self.extents = []
        check_extents(extents, size_bytes)
        is_short = len(extents) <= INLINE_EXTENTS
        trees = [] if is_short else self._writer.add_trees(encode_trees(extents))
        return Stream(
            name=self._name,
            kind=str(self.kind),
            mode=self._mode,
            size_bytes=size_bytes,
            data_bytes=sum(extent[1] for extent in extents),
            extent_count=len(extents),
            extents=tuple(map(Extent._make, extents)) if is_short else (),
            trees=tuple(trees),
        )

    def _write_part(self, offset: int, fd: int, start: int, size: int) -> None:
        chunk = self._chunk_bytes
        head = -offset % chunk if self._next == offset or offset % chunk else 0
        if size - head < max(chunk, _FILE_TASK_BYTES):
            self.write(offset, _read(fd, start, size))
            return
        if head:
            self.write(offset, _read(fd, start, head))
        tail = (offset + size) % chunk
        position, stop = head, size - tail
        while position < stop:
            length = min(stop - position, TASK_BYTES)
            self._writer.submit_file(self, offset + position, fd, start + position, length)
            position += length
        if tail:
            self.write(offset + stop, _read(fd, start + stop, tail))

    def _append(self, offset_bytes: int, view: memoryview, size_bytes: int) -> None:
        """Copy bytes to the end of the buffer."""
        if not size_bytes:
            return
        if self._buffer is None:
            self._buffer = self._writer.take_buffer()
        start = self._filled
        memoryview(self._buffer)[start : start + size_bytes] = view
        self._filled = start + size_bytes
        if offset_bytes == self._next:
            self._runs[-1][1] += size_bytes
        else:
            self._runs.append([offset_bytes, size_bytes])
        self._next = offset_bytes + size_bytes

    def _flush(self, *, keep_open_chunk: bool) -> None:
        """Hand the buffer over; the last chunk, if it is not complete, goes into the next one."""
        buffer = self._buffer
        if buffer is None:
            return
        runs = self._runs
        self._buffer, self._filled, self._runs, self._next = None, 0, [], -1
        view = memoryview(buffer)
        segments = []
        position = 0
        for offset, size in runs:
            segments.append(Segment(offset, view[position : position + size]))
            position += size
        if keep_open_chunk:
            offset, data = segments[-1]
            kept = (offset + len(data)) % self._chunk_bytes
            if kept < len(data):
                segments[-1] = Segment(offset, data[: len(data) - kept])
            else:
                segments.pop()
                kept = len(data)
            if kept == len(data) == len(view):  # a chunk cannot be longer than the buffer
                raise AssertionError("a chunk does not fit into a buffer")
            self._append(offset + len(data) - kept, data[len(data) - kept :], kept)
        self._writer.submit(self, segments, buffer)

    def _write_direct(self, offset_bytes: int, view: memoryview) -> None:
        chunk = self._chunk_bytes
        head = 0
        if self._next == offset_bytes:  # the open chunk of what came before is completed first
            head = -offset_bytes % chunk
            if head > TASK_BYTES - self._filled:
                self._flush(keep_open_chunk=True)
            self._append(offset_bytes, view[:head], head)
        self._flush(keep_open_chunk=False)
        tail = (offset_bytes + len(view)) % chunk
        step = TASK_BYTES
        position, stop = head, len(view) - tail
        while position < stop:
            end = min(stop, position + step - (offset_bytes + position) % step)
            self._writer.submit(self, [Segment(offset_bytes + position, view[position:end])], None)
            position = end
        self._append(offset_bytes + stop, view[stop:], tail)
        self._writer.wait_for(self)


def _read(fd: int, start_bytes: int, size_bytes: int) -> bytes:
    data = os.pread(fd, size_bytes, start_bytes)
    while len(data) < size_bytes:
        more = os.pread(fd, size_bytes - len(data), start_bytes + len(data))
        if not more:
            raise TorchmigError(
                f"cannot store a file: it ends before byte {start_bytes + size_bytes}"
            )
        data += more
    return data
