"""A stream on its way into the repository: gathers what is written into pieces worth a task.

Callers write what they have, from a page to many gigabytes. Large writes are hashed in place by
several threads while the caller waits; small ones are copied and hashed later.
"""

from typing import TYPE_CHECKING, NamedTuple

from torchmig.errors import UsageError
from torchmig.repo.blob import CHUNK_BYTES, Kind
from torchmig.repo.extents import INLINE_EXTENTS, MAX_OFFSET, Extent, check_extents, encode_trees
from torchmig.repo.manifest import Stream, check_stream_name
from torchmig.store import Buffer

if TYPE_CHECKING:
    from torchmig.repo.writer import Writer

_TASK_BYTES = 1 << 20  # a task this long makes its queueing costs vanish and stays in the cache
_DIRECT_BYTES = 4 << 20  # from here on waiting for the hashes is cheaper than a copy


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
        self.extents: list[Extent] = []
        self.submitted = 0
        self.finished: list[None] = []  # appended to by threads, which needs no lock
        self._writer = writer
        self._name = check_stream_name(name)
        self._mode = mode
        self._chunk_bytes = CHUNK_BYTES[kind]
        self._run_offset = 0
        self._run = bytearray()  # the last bytes written, until they reach a chunk border
        self._segments: list[Segment] = []
        self._segment_bytes = 0
        self._end = 0
        self._closed = False

    def write(self, offset_bytes: int, data: Buffer) -> None:
        """Take in bytes; `data` may be reused after return. Nothing may be written twice."""
        view = memoryview(data).cast("B")
        if not len(view):
            return
        end = offset_bytes + len(view)
        if self._closed or offset_bytes < 0 or end > MAX_OFFSET:
            raise UsageError(f"cannot write to stream {self._name!r} at offset {offset_bytes}")
        self._end = max(self._end, end)
        if self._run and offset_bytes != self._run_offset + len(self._run):
            self._end_run()
        if not self._run:
            self._run_offset = offset_bytes
        if len(view) >= _DIRECT_BYTES:
            self._write_direct(offset_bytes, view)
            return
        self._run += view
        if len(self._run) >= _TASK_BYTES:
            self._cut_run()

    def close(self, size_bytes: int | None = None) -> Stream:
        """End the stream and return what the manifest says of it.

        Args:
            size_bytes: the length of the stream, if it ends with a hole; by default it ends with
                the last byte written.
        """
        self._end_run()
        self._submit_segments()
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
        trees: list[bytes] = []
        if not is_short:
            for tree in encode_trees(extents):
                trees += self._writer.add_blobs(Kind.TREE, [memoryview(tree)])
        return Stream(
            name=self._name,
            kind=str(self.kind),
            mode=self._mode,
            size_bytes=size_bytes,
            data_bytes=sum(extent.size_bytes for extent in extents),
            extent_count=len(extents),
            extents=tuple(extents) if is_short else (),
            trees=tuple(trees),
        )

    def _write_direct(self, offset_bytes: int, view: memoryview) -> None:
        chunk = self._chunk_bytes
        head = 0
        if self._run:
            head = -offset_bytes % chunk
            self._run += view[:head]
            self._end_run()
        tail = min(len(view) - head, (offset_bytes + len(view)) % chunk)
        step = max(chunk, _TASK_BYTES)
        position, stop = head, len(view) - tail
        while position < stop:
            end = min(stop, position + step - (offset_bytes + position) % step)
            segment = Segment(offset_bytes + position, view[position:end])
            self._writer.submit(self, [segment], 0)
            position = end
        self._run_offset = offset_bytes + stop
        self._run = bytearray(view[stop:])
        self._writer.wait_for(self)

    def _cut_run(self) -> None:
        """Hand over the run up to its last chunk border."""
        keep = (self._run_offset + len(self._run)) % self._chunk_bytes
        if keep >= len(self._run):
            return
        view = memoryview(self._run)
        cut = len(view) - keep
        self._add_segment(Segment(self._run_offset, view[:cut]))
        self._run = bytearray(view[cut:])  # the old one lives on in the segment
        self._run_offset += cut

    def _end_run(self) -> None:
        if self._run:
            self._add_segment(Segment(self._run_offset, memoryview(self._run)))
            self._run = bytearray()

    def _add_segment(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._segment_bytes += len(segment.data)
        if self._segment_bytes >= _TASK_BYTES:
            self._submit_segments()

    def _submit_segments(self) -> None:
        if self._segments:
            segments, owned_bytes = self._segments, self._segment_bytes
            self._segments, self._segment_bytes = [], 0
            self._writer.submit(self, segments, owned_bytes)
