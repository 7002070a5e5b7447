"""The way in: cut, hash, ask "is it there", compress, pack, store, all at the same time.

Hashing threads take pieces of streams and fill packs; storing threads write full packs. What is in
hand is bounded, so that a slow store slows the producer down and does not fill the memory.
"""

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from blake3 import blake3

from torchmig.errors import StoreError, TorchmigError
from torchmig.repo.blob import CHUNK_BYTES, KIND_CODES, Encoder, Kind, hash_of, zero_hash
from torchmig.repo.buffers import BufferPool
from torchmig.repo.index import encode_index
from torchmig.repo.pack import ENTRY, PACK_BYTES, PackBuilder, SealedPack
from torchmig.repo.pool import Pool, default_threads
from torchmig.repo.session import WriteSession
from torchmig.repo.stream import TASK_BYTES, Segment, StreamWriter
from torchmig.store import Buffer, Store

_log = logging.getLogger(__name__)

DEFAULT_BUDGET_BYTES = 512 << 20
_PACKS_PER_INDEX = 64  # an upload that dies keeps what it had indexed until then


@dataclass(slots=True)
class WriterStats:
    """What went through a writer; sizes are of plain bytes, except `stored_bytes`."""

    read_bytes: int = 0
    new_bytes: int = 0
    duplicate_bytes: int = 0
    zero_bytes: int = 0
    stored_bytes: int = 0  # objects written, headers and index included
    new_blobs: int = 0
    duplicate_blobs: int = 0
    packs: int = 0


class Writer:
    """Takes streams in; everything is durable once its `with` block has been left.

    Several threads may write different streams at once.
    """

    def __init__(
        self, store: Store, session: WriteSession, *, budget_bytes: int = DEFAULT_BUDGET_BYTES,
        threads: int | None = None, put_threads: int = 4,
    ) -> None:  # fmt: skip
        self.stats = WriterStats()
        self._store = store
        self._session = session
        self._index = session.index
        # An eighth of the budget is for pieces that wait to be hashed, one for each of the two
        # open packs, three for packs on their way to the store. The rest is for what the threads
        # hold: a piece each, and the copy of a pack that the S3 SDK insists on.
        self._hashers = Pool("hash", threads or default_threads(), budget_bytes // 8)
        self._putters = Pool("put", put_threads, budget_bytes * 3 // 8)
        self._pack_bytes = min(PACK_BYTES, max(TASK_BYTES, budget_bytes // 8))
        self._lock = threading.Lock()
        self._claimed: set[bytes] = set()
        self._open_packs: dict[bool, PackBuilder] = {}  # keyed by "holds trees"
        self._task_buffers = BufferPool(TASK_BYTES)
        self._pack_buffers = BufferPool(self._pack_bytes)
        self._unindexed: list[tuple[bytes, bytes]] = []
        self._local = threading.local()

    def __enter__(self) -> "Writer":
        self._session.begin()
        self._putters.__enter__()
        self._hashers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._hashers.fail(error)
                self._putters.fail(error)
            self._hashers.__exit__(None, error, None)
            self._putters.__exit__(None, error, None)
            self._session.end(failed=error is not None)

    def stream(self, name: str, kind: str, mode: int = 0o600) -> StreamWriter:
        """Start a stream; see `StreamWriter`."""
        return StreamWriter(self, name, Kind(kind), mode)

    def add_trees(self, trees: Iterable[bytes]) -> list[bytes]:
        """Store tree blobs and return their ids."""
        ids = []
        for tree in trees:
            blob_id = hash_of(tree)
            ids.append(blob_id)
            if self._claim(blob_id):
                self._add_new(Kind.TREE, [(blob_id, memoryview(tree))])
        return ids

    def _claim(self, blob_id: bytes) -> bool:
        """Tell whether a blob is new; only the first who asks is told so and has to store it."""
        with self._lock:
            # A blob leaves the claimed ones only once it is known, so this order misses none.
            if blob_id in self._claimed or blob_id in self._index:
                return False
            self._claimed.add(blob_id)
            return True

    def _add_new(self, kind: Kind, blobs: list[tuple[bytes, memoryview]]) -> None:
        """Compress and pack blobs that this thread has claimed."""
        encoder = self._encoder()
        encoded = [(blob_id, len(data), encoder.encode(data, kind)) for blob_id, data in blobs]
        sealed: list[SealedPack] = []
        with self._lock:
            for blob_id, size_bytes, blob in encoded:
                sealed += self._pack(kind, blob_id, size_bytes, blob.codec, blob.payload)
        for pack in sealed:
            self._submit_pack(pack)

    def has(self, blob_id: bytes) -> bool:
        """Tell whether a blob is stored, or on its way."""
        return blob_id in self._claimed or blob_id in self._index

    def add_stored(
        self, kind: Kind, blob_id: bytes, size_bytes: int, codec: int, payload: memoryview
    ) -> None:
        """Take in a blob in the form in which another repository stores it."""
        with self._lock:
            if self.has(blob_id):
                return
            self._claimed.add(blob_id)
            sealed = self._pack(kind, blob_id, size_bytes, codec, payload)
        for pack in sealed:
            self._submit_pack(pack)

    def _pack(
        self, kind: Kind, blob_id: bytes, size_bytes: int, codec: int, payload: Buffer
    ) -> list[SealedPack]:
        """Add a blob to the open pack of its sort; return that pack if it had to make room."""
        is_tree = kind is Kind.TREE
        pack = self._open_packs.get(is_tree)
        sealed = []
        if pack is not None and not pack.has_room(len(payload)):
            sealed.append(pack.seal())
            pack = None
        if pack is None:
            fits = len(payload) <= self._pack_bytes  # another repository's blobs may not
            buffer = self._pack_buffers.take() if fits else bytearray(len(payload))
            pack = self._open_packs[is_tree] = PackBuilder(buffer)
        pack.add(KIND_CODES[kind], blob_id, size_bytes, codec, payload)
        return sealed

    def hash_segments(self, stream: StreamWriter, segments: list[Segment]) -> None:
        """Cut segments at the chunk borders of the stream and take them in; runs in a thread.

        This is the inner loop of everything that is written: what it does for one chunk of 64 KiB
        must stay small against the hash.
        """
        chunk = CHUNK_BYTES[stream.kind]
        zero_id = zero_hash(chunk)
        known, claimed = self._index.known(), self._claimed
        extents: list[tuple[int, int, bytes]] = []
        new: list[tuple[bytes, memoryview]] = []
        read_bytes = zero_bytes = data_bytes = new_bytes = 0
        for offset, view in segments:
            size = len(view)
            head = min(size, -offset % chunk)
            pieces = [view[:head]] if head else []
            pieces += [view[start : start + chunk] for start in range(head, size, chunk)]
            starts = [offset] if head else []
            starts += range(offset + head, offset + size, chunk)
            blob_ids = [blake3(piece).digest() for piece in pieces]
            for start, piece, blob_id in zip(starts, pieces, blob_ids, strict=True):
                length = len(piece)
                if blob_id not in known and blob_id not in claimed:
                    if blob_id == zero_id or (length != chunk and blob_id == zero_hash(length)):
                        zero_bytes += length
                        continue
                    if self._claim(blob_id):
                        new.append((blob_id, piece))
                        new_bytes += length
                extents.append((start, length, blob_id))
                data_bytes += length
            read_bytes += size
        if new:
            self._add_new(stream.kind, new)
        stream.extents += extents
        with self._lock:
            stats = self.stats
            stats.read_bytes += read_bytes
            stats.zero_bytes += zero_bytes
            stats.new_bytes += new_bytes
            stats.duplicate_bytes += data_bytes - new_bytes
            stats.new_blobs += len(new)
            stats.duplicate_blobs += len(extents) - len(new)

    def take_buffer(self) -> bytearray:
        """Return a buffer for a task; it comes back with `submit`."""
        return self._task_buffers.take()

    def submit(
        self, stream: StreamWriter, segments: list[Segment], buffer: bytearray | None
    ) -> None:
        """Have segments hashed by a thread; `buffer` is the one that they lie in."""
        stream.submitted += 1

        def task() -> None:
            self.hash_segments(stream, segments)
            if buffer is not None:
                self._task_buffers.give(buffer)
            stream.finished.append(None)

        self._hashers.submit(task, 0 if buffer is None else len(buffer))

    def submit_file(
        self, stream: StreamWriter, offset_bytes: int, fd: int, start_bytes: int, size_bytes: int
    ) -> None:
        """Have a part of a file read and hashed by a thread."""
        stream.submitted += 1

        def task() -> None:
            buffer = self._task_buffers.take()
            view = memoryview(buffer)[:size_bytes]
            got = 0
            while got < size_bytes:
                count = os.preadv(fd, [view[got:]], start_bytes + got)
                if not count:
                    raise TorchmigError("cannot store a file: it has become shorter")
                got += count
            self.hash_segments(stream, [Segment(offset_bytes, view)])
            self._task_buffers.give(buffer)
            stream.finished.append(None)

        self._hashers.submit(task)

    def wait_for(self, stream: StreamWriter) -> None:
        """Wait until all that was submitted for `stream` is hashed."""
        self._hashers.wait_for(lambda: len(stream.finished) == stream.submitted)

    def _submit_pack(self, pack: SealedPack) -> None:
        def task() -> None:
            self._store.put(pack.name, pack.parts)
            self._pack_buffers.give(pack.buffer)
            self._pack_is_stored(pack)

        self._putters.submit(task, pack.size_bytes)

    def _pack_is_stored(self, pack: SealedPack) -> None:
        self._index.add_pack(pack.pack_id, pack.header)
        # Only after the index knows them, so that no thread ever finds them in neither.
        self._claimed.difference_update(entry[0] for entry in ENTRY.iter_unpack(pack.header))
        batch: list[tuple[bytes, bytes]] = []
        with self._lock:
            self.stats.packs += 1
            self.stats.stored_bytes += pack.size_bytes
            self._unindexed.append((pack.pack_id, pack.header))
            if len(self._unindexed) >= _PACKS_PER_INDEX:
                batch, self._unindexed = self._unindexed, []
        if batch:
            self._put_index(batch)

    def _put_index(self, packs: list[tuple[bytes, bytes]]) -> None:
        # An index must not name packs that a prune has deleted since: asked before, and after, so
        # that whichever came first is noticed.
        self._session.require_lock()
        name, data = encode_index(packs)
        self._store.put(name, [data])
        try:
            self._session.require_lock()
        except StoreError:
            self._store.delete(name)
            raise
        self._index.note_object(name)
        with self._lock:
            self.stats.stored_bytes += len(data)

    def _finish(self) -> None:
        self._hashers.wait_idle()
        for pack in self._open_packs.values():
            if not pack.is_empty:
                self._submit_pack(pack.seal())
        self._putters.wait_idle()
        if self._unindexed:  # only now: an index never names a pack that is not stored yet
            self._put_index(self._unindexed)
            self._unindexed = []
        _log.debug("writer done: %s", self.stats)

    def _encoder(self) -> Encoder:
        encoder: Encoder | None = getattr(self._local, "encoder", None)
        if encoder is None:
            encoder = self._local.encoder = Encoder()
        return encoder
