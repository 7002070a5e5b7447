"""GPU blocks as a stream of a repository, one stream a rank and device, and back.

Blocks lie in it one after the other, each at the start of a chunk, so that a block's blobs
depend on its bytes alone: data-parallel ranks, which hold equal tensors at whatever addresses,
store them once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from torchmig.capture.device.windows import Block, Piece
from torchmig.errors import IntegrityError, SnapshotUnfitError
from torchmig.repo import Kind, MappedFile, Mapping, Reader, Stream, Writer
from torchmig.repo.blob import CHUNK_BYTES
from torchmig.repo.extents import Row

GPU = "gpu/"


@dataclass(frozen=True, slots=True)
class Placed:
    """A block and where its bytes begin in its device's stream."""

    block: Block
    stream_offset: int


def place(blocks: Sequence[Block]) -> list[Placed]:
    """Give every block its place in the stream of its device."""
    chunk = CHUNK_BYTES[Kind.GPU_BLOCK]
    ends: dict[int, int] = {}
    placed = []
    for block in blocks:
        start = ends.get(block.device, 0)
        placed.append(Placed(block, start))
        ends[block.device] = start + -(-block.size_bytes // chunk) * chunk
    return placed


def store(
    writer: Writer, blocks: Sequence[Block], pieces: Sequence[Piece], staging_fd: int, prefix: str
) -> list[Stream]:
    """Write the blocks that lie in staging into the repository."""
    placed = place(blocks)
    streams = []
    for device in sorted({block.device for block in blocks}):
        stream = writer.stream(f"{prefix}{GPU}{device}", Kind.GPU_BLOCK)
        for piece in pieces:
            if blocks[piece.block].device == device:
                start = placed[piece.block].stream_offset + piece.block_offset
                stream.write_file(start, staging_fd, piece.offset, piece.size_bytes)
        streams.append(stream.close())
    return streams


class Spill:
    """Takes blocks into the repository window by window, where staging cannot hold them at once."""

    def __init__(self, writer: Writer, blocks: Sequence[Block], prefix: str) -> None:
        self._blocks = blocks
        self._placed = place(blocks)
        self._streams = {
            device: writer.stream(f"{prefix}{GPU}{device}", Kind.GPU_BLOCK)
            for device in sorted({block.device for block in blocks})
        }

    def add(self, window: Sequence[Piece], staging: memoryview) -> None:
        """Take in what lies in staging; it may be overwritten after return."""
        for piece in window:
            start = self._placed[piece.block].stream_offset + piece.block_offset
            data = staging[piece.offset : piece.offset + piece.size_bytes]
            self._streams[self._blocks[piece.block].device].write(start, data)

    def close(self) -> list[Stream]:
        """End the streams and return what the manifest says of them."""
        return [stream.close() for stream in self._streams.values()]


class StoredBlocks:
    """Blocks that lie in a repository."""

    def __init__(self, blocks: Sequence[Block], streams: Sequence[Stream], prefix: str) -> None:
        """Find the streams; nothing is read yet.

        Args:
            blocks: As `store` got them.
            streams: Among them those that `store` has returned.
            prefix: As `store` got it.

        Raises:
            IntegrityError: One of the streams is not there.
        """
        self.blocks = blocks
        self._placed = place(blocks)
        self._streams: dict[int, Stream] = {}
        self._rows: dict[int, list[Row]] = {}
        by_name = {stream.name: stream for stream in streams}
        for device in sorted({block.device for block in blocks}):
            name = f"{prefix}{GPU}{device}"
            if name not in by_name:
                raise IntegrityError(f"the snapshot lacks the stream '{name}'")
            self._streams[device] = by_name[name]

    def locate(self, reader: Reader) -> None:
        """Find where all bytes lie in the repository, if that is not known yet."""
        for device, stream in self._streams.items():
            if device not in self._rows:
                self._rows[device] = reader.rows(stream)

    def bring(self, reader: Reader, pieces: Sequence[Piece], staging: MappedFile) -> None:
        """Bring pieces of the blocks into staging, whatever lies there."""
        self.locate(reader)
        for device, stream in self._streams.items():
            mappings = [
                Mapping(
                    self._placed[piece.block].stream_offset + piece.block_offset,
                    piece.size_bytes,
                    piece.offset,
                )
                for piece in pieces
                if self.blocks[piece.block].device == device
            ]
            if not mappings:
                continue
            rows = between(self._rows[device], mappings)
            for offset, size in holes(rows, mappings):
                staging.write_zeros(offset, size)
            reader.restore(stream, staging, mappings, rows)


def between(rows: list[Row], mappings: Sequence[Mapping]) -> list[Row]:
    """Return the extents that lie between the begin of the first mapping and the end of the last.

    Args:
        rows: In the order of offsets.
        mappings: In the order of stream offsets.
    """
    begin, end = mappings[0].offset_bytes, mappings[-1].offset_bytes + mappings[-1].size_bytes
    first = bisect_right(rows, begin, key=itemgetter(0))
    if first and rows[first - 1][0] + rows[first - 1][1] > begin:
        first -= 1
    return rows[first : bisect_left(rows, end, key=itemgetter(0))]


def holes(rows: Sequence[Row], mappings: Sequence[Mapping]) -> Iterator[tuple[int, int]]:
    """Yield what the mappings name and no extent has: where in the file, and how many bytes.

    Args:
        rows: In the order of offsets.
        mappings: In the order of stream offsets.
    """
    number = 0
    for mapping in mappings:
        position, end = mapping.offset_bytes, mapping.offset_bytes + mapping.size_bytes
        while position < end:
            while number < len(rows) and rows[number][0] + rows[number][1] <= position:
                number += 1
            begin = min(rows[number][0], end) if number < len(rows) else end
            if begin > position:
                yield mapping.target_bytes + position - mapping.offset_bytes, begin - position
            position = begin
            if begin < end:
                position = rows[number][0] + rows[number][1]


def to_state(blocks: Sequence[Block]) -> list[list[int]]:
    """Return the blocks in the form that goes into a manifest."""
    return [[block.device, block.address, block.size_bytes] for block in blocks]


def from_state(state: object) -> list[Block]:
    """Return the blocks of a manifest; raise `SnapshotUnfitError` on anything else."""
    if not isinstance(state, list):
        raise SnapshotUnfitError("the snapshot names no GPU blocks")
    blocks = []
    for item in state:
        if not (isinstance(item, list) and len(item) == 3 and all(type(n) is int for n in item)):
            raise SnapshotUnfitError(f"the snapshot names a GPU block that is none: {item!r}")
        blocks.append(Block(*item))
    return blocks
