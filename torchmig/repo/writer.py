"""The way in: cut, hash, ask "is it there", compress, pack, store, all at the same time.

Hashing threads take pieces of streams and fill packs; storing threads write full packs. What is in
hand is bounded, so that a slow store slows the producer down and does not fill the memory.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from torchmig.repo.blob import CHUNK_BYTES, KIND_CODES, Encoder, Kind, hash_of, zero_hash
from torchmig.repo.extents import Extent
from torchmig.repo.index import encode_index
from torchmig.repo.pack import ENTRY, PACK_BYTES, PackBuilder, SealedPack
from torchmig.repo.pool import Pool, default_threads
from torchmig.repo.session import WriteSession
from torchmig.repo.stream import Segment, StreamWriter
from torchmig.store import Store

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
        # Half of the budget is for packs on their way to the store, a quarter for pieces that wait
        # to be hashed; the rest is what the threads themselves hold.
        self._hashers = Pool("hash", threads or default_threads(), budget_bytes // 4)
        self._putters = Pool("put", put_threads, max(PACK_BYTES, budget_bytes // 2))
        self._pack_bytes = min(PACK_BYTES, max(1 << 20, budget_bytes // 8))
        self._lock = threading.Lock()
        self._claimed: set[bytes] = set()
        self._open_packs = {False: PackBuilder(), True: PackBuilder()}  # keyed by "holds trees"
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

    def add_blobs(self, kind: Kind, pieces: Sequence[memoryview]) -> list[bytes]:
        """Store what is not there yet of `pieces` and return their ids; runs in any thread."""
        encoder = self._encoder()
        index, claimed = self._index, self._claimed
        blob_ids, new = [], []
        new_bytes = duplicate_bytes = 0
        for piece in pieces:
            blob_id = hash_of(piece)
            blob_ids.append(blob_id)
            if blob_id not in claimed and blob_id not in index:
                with self._lock:
                    is_new = blob_id not in claimed and blob_id not in index
                    if is_new:
                        claimed.add(blob_id)
                if is_new:
                    new.append((blob_id, len(piece), encoder.encode(piece)))
                    new_bytes += len(piece)
                    continue
            duplicate_bytes += len(piece)
        sealed: list[SealedPack] = []
        is_tree = kind is Kind.TREE
        with self._lock:
            if not is_tree:
                self.stats.new_bytes += new_bytes
                self.stats.duplicate_bytes += duplicate_bytes
                self.stats.new_blobs += len(new)
                self.stats.duplicate_blobs += len(pieces) - len(new)
            for blob_id, size_bytes, encoded in new:
                pack = self._open_packs[is_tree]
                pack.add(kind, blob_id, size_bytes, encoded)
                if pack.size_bytes >= self._pack_bytes:
                    sealed.append(pack.seal())
                    self._open_packs[is_tree] = PackBuilder()
        for pack_to_put in sealed:
            self._submit_pack(pack_to_put)
        return blob_ids

    def has(self, blob_id: bytes) -> bool:
        """Tell whether a blob is stored, or on its way."""
        return blob_id in self._claimed or blob_id in self._index

    def add_stored(
        self, kind: Kind, blob_id: bytes, size_bytes: int, codec: int, payload: memoryview
    ) -> None:
        """Take in a blob in the form in which another repository stores it."""
        sealed: SealedPack | None = None
        is_tree = kind is Kind.TREE
        with self._lock:
            if self.has(blob_id):
                return
            self._claimed.add(blob_id)
            pack = self._open_packs[is_tree]
            pack.add_stored(KIND_CODES[kind], blob_id, size_bytes, codec, bytes(payload))
            if pack.size_bytes >= self._pack_bytes:
                sealed = pack.seal()
                self._open_packs[is_tree] = PackBuilder()
        if sealed is not None:
            self._submit_pack(sealed)

    def hash_segments(self, stream: StreamWriter, segments: list[Segment]) -> None:
        """Cut segments at the chunk borders of the stream and take them in; runs in a thread."""
        chunk = CHUNK_BYTES[stream.kind]
        offsets: list[int] = []
        pieces: list[memoryview] = []
        read_bytes = zero_bytes = 0
        for offset, view in segments:
            start = 0
            while start < len(view):
                end = min(len(view), start + chunk - (offset + start) % chunk)
                piece = view[start:end]
                read_bytes += end - start
                if _is_zero(piece):
                    zero_bytes += end - start
                else:
                    offsets.append(offset + start)
                    pieces.append(piece)
                start = end
        blob_ids = self.add_blobs(stream.kind, pieces)
        stream.extents.extend(map(Extent, offsets, map(len, pieces), blob_ids))
        with self._lock:
            self.stats.read_bytes += read_bytes
            self.stats.zero_bytes += zero_bytes

    def submit(self, stream: StreamWriter, segments: list[Segment], owned_bytes: int) -> None:
        """Have segments hashed by a thread; `owned_bytes` is the memory that they keep alive."""
        stream.submitted += 1

        def task() -> None:
            self.hash_segments(stream, segments)
            stream.finished.append(None)

        self._hashers.submit(task, owned_bytes)

    def wait_for(self, stream: StreamWriter) -> None:
        """Wait until all that was submitted for `stream` is hashed."""
        self._hashers.wait_for(lambda: len(stream.finished) == stream.submitted)

    def _submit_pack(self, pack: SealedPack) -> None:
        def task() -> None:
            self._store.put(pack.name, pack.parts)
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
        name, data = encode_index(packs)
        self._store.put(name, [data])
        self._index.note_object(name)
        with self._lock:
            self.stats.stored_bytes += len(data)

    def _finish(self) -> None:
        self._hashers.wait_idle()
        for pack in self._open_packs.values():
            if pack.entries:
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


def _is_zero(piece: memoryview) -> bool:
    # Nearly every chunk that is not zero shows it at one of these places, for the price of three
    # lookups; only the others are hashed once more.
    if piece[0] or piece[-1] or piece[len(piece) // 2]:
        return False
    return hash_of(piece) == zero_hash(len(piece))
