"""Blobs: pieces of bytes named by the blake3 hash of what they hold, compressed where it pays.

A compressed blob carries a hash of its compressed bytes in front, so that every stored byte is
covered by some hash and a decompressor never sees bytes that nobody vouched for.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache

import zstandard
from blake3 import blake3

from torchmig.errors import IntegrityError
from torchmig.repo.buffers import Memory
from torchmig.repo.planes import merge, split
from torchmig.store import Buffer

ID_BYTES = 32
MAX_BLOB_BYTES = 16 << 20  # what a reader is ready to hold for one blob; a larger one is damage
_FRAME_HASH_BYTES = 16
_PROBE_BYTES = 4096
_PROBE_PARTS = 4
_SURE = 8
_LARGE_BYTES = 128 << 10  # from here on malloc asks the kernel each time
_WORTH = 0.95  # a blob that compresses to more than this is stored as it is


class Kind(StrEnum):
    """What a stream or blob holds; decides the chunk size and the compression."""

    HOST_PAGES = "host-pages"
    CRIU_IMAGE = "criu-image"
    FILE = "file"
    GPU_BLOCK = "gpu-block"
    TREE = "tree"


KIND_CODES = {kind: code for code, kind in enumerate(Kind)}

# Host pages share bytes over time only in small pieces that lie at equal addresses; GPU blocks are
# equal as a whole or not at all, so that larger pieces cost less.
CHUNK_BYTES = {
    Kind.HOST_PAGES: 64 << 10,
    Kind.CRIU_IMAGE: 1 << 20,
    Kind.FILE: 1 << 20,
    Kind.GPU_BLOCK: 4 << 20,
    Kind.TREE: 1 << 20,
}


class Codec(IntEnum):
    """How the bytes of a blob are stored."""

    PLAIN = 0
    ZSTD = 1
    ZSTD_PLANES_2 = 2  # byte planes of numbers of 2 bytes, then zstd
    ZSTD_PLANES_4 = 3


_PLANE_WIDTHS = {Codec.ZSTD_PLANES_2: 2, Codec.ZSTD_PLANES_4: 4}
_PLANES_PROBE_BYTES = 16 << 10
_PLANES_MIN_BYTES = 1 << 20  # zstd codes 128 KiB at a time: shorter planes would share a code
_PLANES_WORTH = 0.95  # of the size without planes


@dataclass(frozen=True, slots=True)
class Encoded:
    """A blob as it will be stored."""

    codec: Codec
    payload: Buffer  # a view of the caller's bytes where they are stored as they are


class Encoder:
    """Compresses blobs; one for each thread."""

    def __init__(self, level: int = 1) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level, write_content_size=True)
        self._refused = 0  # blobs in a row that were not worth compressing

    def encode(self, data: memoryview, kind: Kind) -> Encoded:
        """Return the stored form of a blob, compressed if a probe says that it pays."""
        codec = self._best_planes(data) if kind is Kind.GPU_BLOCK else None
        if codec is not None or self._is_promising(data):
            planes = data if codec is None else split(data, _PLANE_WIDTHS[codec])
            frame = self._zstd.compress(planes)
            if len(frame) + _FRAME_HASH_BYTES <= len(data) * _WORTH:
                payload = blake3(frame).digest(length=_FRAME_HASH_BYTES) + frame
                return Encoded(codec or Codec.ZSTD, payload)
        return Encoded(Codec.PLAIN, data)

    def _best_planes(self, data: memoryview) -> Codec | None:
        """Return the byte planes that make a sample of numbers smaller, if any do."""
        if len(data) < _PLANES_MIN_BYTES:
            return None
        middle = len(data) // 2 & -4096
        probe = data[middle : middle + _PLANES_PROBE_BYTES]
        plain_bytes = len(self._zstd.compress(probe))
        best, best_bytes = None, min(plain_bytes, len(probe)) * _PLANES_WORTH
        for codec, width in _PLANE_WIDTHS.items():
            if len(data) % width == 0:
                # Each plane for itself, as it will be in the many blocks of a long blob.
                part = len(probe) // width
                planes = split(probe, width)
                size_bytes = sum(
                    len(self._zstd.compress(planes[at : at + part]))
                    for at in range(0, len(probe), part)
                )
                if size_bytes < best_bytes:
                    best, best_bytes = codec, size_bytes
        return best

    def _is_promising(self, data: memoryview) -> bool:
        if len(data) <= 4 * _PROBE_BYTES:
            return True
        # Bytes that do not compress come in long stretches: there only some blobs are probed.
        if self._refused >= _SURE and self._refused % _SURE:
            self._refused += 1
            return False
        step = len(data) // _PROBE_PARTS
        part = _PROBE_BYTES // _PROBE_PARTS
        probe = b"".join([data[at : at + part] for at in range(step // 2, len(data), step)])
        is_promising = len(self._zstd.compress(probe)) <= len(probe) * _WORTH
        self._refused = 0 if is_promising else self._refused + 1
        return is_promising


class Decoder:
    """Gives back the bytes of blobs and refuses those that do not match; one for each thread."""

    def __init__(self, *, reuses_memory: bool = False) -> None:
        """Prepare.

        Args:
            reuses_memory: What `decode` returns lasts until its next call, and is where the last
                one was. Fresh memory for each blob costs as much time as unpacking it, and more
                where many threads want some: the kernel clears it and takes it away again.
        """
        self._zstd = zstandard.ZstdDecompressor()
        self._unpacked = Memory() if reuses_memory else None
        self._merged = Memory() if reuses_memory else None

    def decode(self, blob_id: bytes, codec: int, payload: memoryview, size_bytes: int) -> Buffer:
        """Return the blob's bytes, checked against `blob_id`; raise `IntegrityError` otherwise."""
        data: Buffer
        if codec == Codec.PLAIN:
            data = payload
        elif codec == Codec.ZSTD:
            data = self._decompress(payload, size_bytes)
        elif codec in _PLANE_WIDTHS:
            width = _PLANE_WIDTHS[Codec(codec)]
            if size_bytes % width:
                raise IntegrityError(f"its {size_bytes} bytes cannot be byte planes")
            planes = self._decompress(payload, size_bytes)
            merged = (
                bytearray(size_bytes) if self._merged is None else self._merged.take(size_bytes)
            )
            merge(planes, width, merged)
            data = merged
        else:
            raise IntegrityError(f"its compression {codec} is unknown")
        if len(data) != size_bytes:
            raise IntegrityError(f"it holds {len(data)} bytes, not {size_bytes}")
        if blake3(data).digest() != blob_id:
            raise IntegrityError("its bytes do not match its hash")
        return data

    def _decompress(self, payload: memoryview, size_bytes: int) -> Buffer:
        frame = payload[_FRAME_HASH_BYTES:]
        if blake3(frame).digest(length=_FRAME_HASH_BYTES) != payload[:_FRAME_HASH_BYTES]:
            raise IntegrityError("its compressed bytes do not match their hash")
        try:
            claimed_bytes = zstandard.frame_content_size(frame)
            if claimed_bytes != size_bytes:
                raise IntegrityError(f"it unpacks to {claimed_bytes} bytes, not {size_bytes}")
            if self._unpacked is None or size_bytes < _LARGE_BYTES:
                return self._zstd.decompress(frame, max_output_size=size_bytes)
            memory = self._unpacked.take(size_bytes)
            return memory[: self._zstd.stream_reader(frame).readinto(memory)]
        except zstandard.ZstdError as error:
            raise IntegrityError(f"it cannot be decompressed ({error})") from error


def hash_of(data: Buffer) -> bytes:
    """Return the name of the bytes."""
    return blake3(data).digest()


@lru_cache(maxsize=4096)
def zero_hash(size_bytes: int) -> bytes:
    """Return the name of that many zero bytes."""
    return blake3(bytes(size_bytes)).digest()
