"""GPU blocks as a stream of a repository, one stream a rank and device, and back.

Blocks lie in it one after the other, each at the start of a chunk, so that a block's blobs
depend on its bytes alone: data-parallel ranks, which hold equal tensors at whatever addresses,
store them once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmig.capture.device.windows import Block, Piece
from torchmig.errors import IntegrityError, SnapshotUnfitError
from torchmig.repo import Kind, Mapping, Reader, Stream, Writer
from torchmig.repo.blob import CHUNK_BYTES

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


def restore(
    reader: Reader,
    streams: Sequence[Stream],
    blocks: Sequence[Block],
    pieces: Sequence[Piece],
    staging_fd: int,
    prefix: str,
) -> None:
    """Bring pieces of the blocks into staging that holds zeros, which are not written again."""
    placed = place(blocks)
    by_name = {stream.name: stream for stream in streams}
    for device in sorted({block.device for block in blocks}):
        stream = by_name.get(f"{prefix}{GPU}{device}")
        if stream is None:
            raise IntegrityError(f"the snapshot lacks the stream '{prefix}{GPU}{device}'")
        own = [piece for piece in pieces if blocks[piece.block].device == device]
        if not own:
            continue
        reader.restore(stream, staging_fd, list(_mappings(placed, own)))


def _mappings(placed: Sequence[Placed], pieces: Sequence[Piece]) -> Iterator[Mapping]:
    for piece in pieces:
        start = placed[piece.block].stream_offset + piece.block_offset
        yield Mapping(start, piece.size_bytes, piece.offset)


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
