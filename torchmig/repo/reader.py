"""The way out: plan, read, check every blob against its hash, decompress, use.

The same pipeline serves restoring into a file, reading in order and checking; none of them lets a
byte through that its hash does not vouch for.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torchmig.errors import IntegrityError, ObjectMissingError, TorchmigError, UsageError
from torchmig.repo.advance import Advance, unheard
from torchmig.repo.blob import Decoder
from torchmig.repo.buffers import Memory
from torchmig.repo.extents import MAX_OFFSET, Extent, Row, check_extents, decode_tree
from torchmig.repo.index import Index, Location
from torchmig.repo.manifest import Stream
from torchmig.repo.memory import MappedFile
from torchmig.repo.plan import Read, Wanted, locate, plan_reads
from torchmig.repo.pool import Pool, default_threads
from torchmig.store import Buffer, Store

DEFAULT_BUDGET_BYTES = 512 << 20
_MAX_IN_MEMORY_BYTES = 1 << 30
_WINDOW_BYTES = 32 << 20
_FEW_EXTENTS = 64
_PLANNED_EXTENTS = 1 << 16

Use = Callable[[Wanted, Buffer, memoryview], None]
"""What is done with a blob: told its bytes and the form in which they are stored.

Both are overwritten after it, but for tasks that were told to keep them.
"""


class Mapping(NamedTuple):
    """`size_bytes` of a stream, from `offset_bytes` on, go to `target_bytes` in the file."""

    offset_bytes: int
    size_bytes: int
    target_bytes: int


class Reader:
    """Gives streams back; one `with` block may restore many, from several threads at once."""

    def __init__(
        self, store: Store, index: Index, snapshot_id: str, *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES, threads: int | None = None,
        advance: Advance = unheard,
    ) -> None:  # fmt: skip
        self._store = store
        self._index = index
        self._snapshot_id = snapshot_id
        self._budget_bytes = budget_bytes
        self._advance = advance
        self._read_bytes = min(store.read_bytes, max(1 << 20, budget_bytes // 8))
        # Each thread has a buffer for one read.
        most = max(1, budget_bytes // 2 // self._read_bytes)
        self._threads = min(threads or default_threads(), most)
        self._is_refreshed = False
        self._refresh_lock = threading.Lock()
        self._missing: set[str] = set()  # packs that were not where the index said
        # For the threads of all pools, each of which lasts for one call only.
        self._spare_tools: list[_Tools] = []
        self._is_open = False

    def __enter__(self) -> "Reader":
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False

    def restore(
        self,
        stream: Stream,
        target: int | str | Path | MappedFile,
        mapping: Sequence[Mapping] | None = None,
        extents: list[Row] | None = None,
    ) -> None:
        """Write the bytes of `stream` into a file; holes stay holes.

        Args:
            stream: what to restore.
            target: a path, which is made with the stream's mode and must not exist; an open file,
                which is emptied first if there is no mapping; a mapped one, for which there is.
            mapping: which part of the stream goes where in the file, in the order of stream
                offsets, for streams whose offsets are addresses. The file's length is then the
                caller's business, and bytes that no mapping names are left out.
            extents: those of the stream that the mapping touches, from a caller who knows them: one
                who takes a long stream in many parts does not want all looked through each time.
        """
        if isinstance(target, int | MappedFile):
            self._restore_into(stream, target, mapping, extents)
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(target, flags, stream.mode & 0o7777)
        except OSError as error:
            raise TorchmigError(f"cannot restore to {str(target)!r}: {error.strerror}") from error
        try:
            os.fchmod(fd, stream.mode & 0o7777)  # open() went through the umask
            self._restore_into(stream, fd, mapping, extents)
        finally:
            os.close(fd)

    def read(self, stream: Stream) -> bytes:
        """Return all bytes of a stream that fits into memory."""
        if stream.size_bytes > _MAX_IN_MEMORY_BYTES:
            raise UsageError(f"cannot read stream {stream.name!r} at once: it is too long")
        data = bytearray(stream.size_bytes)
        for offset, chunk in self.chunks(stream):
            data[offset : offset + len(chunk)] = chunk
        return bytes(data)

    def chunks(
        self, stream: Stream, start_bytes: int = 0, stop_bytes: int = MAX_OFFSET
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset, bytes) in the order of offsets; zeros and holes are left out.

        Whole chunks come, so the first and the last may reach beyond `start_bytes` and
        `stop_bytes`. Reading goes on ahead while the caller uses what it got.
        """
        extents = [
            row
            for row in self.rows(stream)
            if row[0] < stop_bytes and row[0] + row[1] > start_bytes
        ]
        windows = deque(_windows(extents, min(_WINDOW_BYTES, self._budget_bytes // 8)))
        with self._pool() as pool:
            running: deque[tuple[list[Row], dict[bytes, Buffer], list[None], int]] = deque()

            def start_next() -> None:
                window = windows.popleft()
                found: dict[bytes, Buffer] = {}
                done: list[None] = []
                reads = self._plan(stream, window)
                for read in reads:

                    def use(wanted: Wanted, data: Buffer, _: memoryview) -> None:
                        # The payload of a plain blob is a view of the whole read.
                        found[wanted.blob_id] = data

                    pool.submit(self._task(stream, read, use, done, keeps=True))
                running.append((window, found, done, len(reads)))

            for _ in range(min(2, len(windows))):
                start_next()
            while running:
                window, found, done, count = running.popleft()
                pool.wait_for(lambda done=done, count=count: len(done) == count)  # type: ignore[misc]
                for offset, _, blob_id in window:
                    yield offset, memoryview(found[blob_id]).toreadonly()
                if windows:
                    start_next()

    def read_range(self, stream: Stream, offset_bytes: int, size_bytes: int) -> bytes:
        """Return a range of a stream, holes as zeros; short if the stream ends before."""
        end = min(offset_bytes + size_bytes, stream.size_bytes)
        if end - offset_bytes > _MAX_IN_MEMORY_BYTES:
            raise UsageError(f"cannot read {size_bytes} bytes of {stream.name!r} at once")
        data = bytearray(max(0, end - offset_bytes))
        for at, chunk in self.chunks(stream, offset_bytes, end):
            skip = max(0, offset_bytes - at)
            part = chunk[skip : max(skip, end - at)]
            data[at + skip - offset_bytes : at + skip - offset_bytes + len(part)] = part
        return bytes(data)

    def verify(self, streams: Iterable[Stream]) -> None:
        """Read and check all bytes of the streams without keeping them."""

        def ignore(wanted: Wanted, data: Buffer, _: memoryview) -> None:
            pass

        for stream in streams:
            self._for_each(stream, self.rows(stream), ignore)

    def extents(self, stream: Stream) -> list[Extent]:
        """Return where the bytes of a stream lie, in the order of offsets."""
        return list(map(Extent._make, self.rows(stream)))

    def rows(self, stream: Stream) -> list[Row]:
        """Return the extents of a stream as plain tuples, for streams of millions."""
        if not stream.trees:
            return list(stream.extents)
        trees: dict[bytes, list[Row]] = {}

        def use(wanted: Wanted, data: Buffer, _: memoryview) -> None:
            trees[wanted.blob_id] = decode_tree(data)

        self._for_each(stream, self.tree_rows(stream), use)
        rows = [row for tree in stream.trees for row in trees[tree]]
        try:
            check_extents(rows, stream.size_bytes)
        except IntegrityError as error:
            raise self._damaged(stream, str(error)) from error
        if len(rows) != stream.extent_count:
            raise self._damaged(stream, f"it has {len(rows)} extents of {stream.extent_count}")
        return rows

    def has(self, stream: Stream) -> bool:
        """Tell whether all blobs of a stream are in this repository, as far as its index says."""
        self._refresh_once()
        if any(tree not in self._index for tree in stream.trees):
            return False
        return all(row[2] in self._index for row in self.rows(stream))

    def tree_rows(self, stream: Stream) -> list[Row]:
        """Return the tree blobs of a stream as extents, numbered by their order."""
        self._refresh_once()
        wanted: list[Row] = []
        for number, tree in enumerate(stream.trees):
            location = self._index.find(tree)
            if location is None:
                raise self._damaged(stream, f"its tree blob {tree.hex()[:16]!r} is in no index")
            wanted.append((number, location.size_bytes, tree))
        return wanted

    def for_each_stored(self, stream: Stream, extents: list[Row], use: Use) -> None:
        """Call `use` with every blob of `extents`, checked, from several threads at once."""
        self._for_each(stream, extents, use)

    def locate(self, stream: Stream, row: Row) -> Location:
        """Return where the blob of an extent lies."""
        self._refresh_once()
        try:
            return locate(self._index, row[2], row[1])
        except IntegrityError as error:
            raise self._damaged(stream, str(error)) from error

    def _restore_into(
        self,
        stream: Stream,
        target: int | MappedFile,
        mapping: Sequence[Mapping] | None,
        extents: list[Row] | None,
    ) -> None:
        if extents is None:
            extents = self.rows(stream)
        put = target.write if isinstance(target, MappedFile) else partial(_write_at, target)
        if mapping is None:
            if isinstance(target, MappedFile):
                raise UsageError("what goes where in a mapped file has to be said")
            os.ftruncate(target, 0)
            os.ftruncate(target, stream.size_bytes)

            def write(wanted: Wanted, data: Buffer, _: memoryview) -> None:
                for offset in wanted.offsets:
                    put(data, offset)
                    self._advance(len(data))

            self._for_each(stream, extents, write)
            return
        targets = _targets(extents, mapping)

        def write_mapped(wanted: Wanted, data: Buffer, _: memoryview) -> None:
            view = memoryview(data)
            for offset in wanted.offsets:
                for start, end, place in targets[offset]:
                    put(data if end - start == len(data) else view[start:end], place)
                    self._advance(end - start)

        self._for_each(stream, [row for row in extents if row[0] in targets], write_mapped)

    def _for_each(self, stream: Stream, extents: list[Row], use: Use) -> None:
        """Call `use` with every blob of `extents`, in any order and from several threads."""
        if len(extents) <= _FEW_EXTENTS:
            reads = self._plan(stream, extents)
            if len(reads) <= 1:  # most files: no threads needed
                for read in reads:
                    self._task(stream, read, use, [])()
                return
        with self._pool() as pool:
            # Planned piece by piece: the plan of a million blobs would take longer than their
            # first bytes, and more memory than the budget.
            for start in range(0, len(extents), _PLANNED_EXTENTS):
                for read in self._plan(stream, extents[start : start + _PLANNED_EXTENTS]):
                    self._store.expect(read.name, read.offset_bytes, read.size_bytes)
                    pool.submit(self._task(stream, read, use, []), read.weight_bytes)
            pool.wait_idle()

    def _pool(self) -> Pool:
        if not self._is_open:
            raise UsageError("a reader works only inside its 'with' block")
        return Pool("read", self._threads, self._budget_bytes // 2)

    def _plan(self, stream: Stream, extents: list[Row]) -> list[Read]:
        self._refresh_once()
        try:
            return plan_reads(self._index, extents, self._read_bytes)
        except IntegrityError as error:
            raise self._damaged(stream, str(error)) from error

    def _plan_again(self, stream: Stream, read: Read, error: ObjectMissingError) -> list[Read]:
        """Return reads for blobs whose pack has gone, which a prune may have moved elsewhere."""
        with self._refresh_lock:
            if read.name not in self._missing:
                self._missing.add(read.name)
                self._index.refresh(self._store)
        extents = [
            (offset, wanted.size_bytes, wanted.blob_id)
            for wanted in read.blobs
            for offset in wanted.offsets
        ]
        reads = self._plan(stream, extents)
        if any(moved.name in self._missing for moved in reads):
            raise self._damaged(stream, f"object {read.name!r} is missing") from error
        return reads

    def _refresh_once(self) -> None:
        with self._refresh_lock:
            if not self._is_refreshed:
                self._index.refresh(self._store)
                self._is_refreshed = True

    def _task(
        self, stream: Stream, read: Read, use: Use, done: list[None], *, keeps: bool = False
    ) -> Callable[[], None]:
        """Return the task that does one read; with `keeps`, what `use` gets lasts beyond it."""

        def task() -> None:
            if keeps:
                self._do(stream, read, use, None)
            else:
                try:
                    tools = self._spare_tools.pop()
                except IndexError:
                    tools = _Tools()
                self._do(stream, read, use, tools)
                self._spare_tools.append(tools)
            done.append(None)

        return task

    def _do(self, stream: Stream, read: Read, use: Use, tools: "_Tools | None") -> None:
        """Do one read; without tools, what `use` gets lasts beyond it."""
        try:
            if tools is None:
                data = memoryview(self._store.get(read.name, read.offset_bytes, read.size_bytes))
            else:
                buffer = tools.memory.take(max(read.size_bytes, self._read_bytes))[
                    : read.size_bytes
                ]
                data = self._store.get_into(read.name, read.offset_bytes, buffer)
        except ObjectMissingError as error:
            for moved in self._plan_again(stream, read, error):
                self._do(stream, moved, use, tools)
            return
        decoder = Decoder() if tools is None else tools.decoder
        for wanted in read.blobs:
            start = wanted.offset_bytes - read.offset_bytes
            payload = data[start : start + wanted.stored_bytes]
            try:
                blob = decoder.decode(wanted.blob_id, wanted.codec, payload, wanted.size_bytes)
            except IntegrityError as error:
                raise self._damaged(
                    stream,
                    f"blob {wanted.blob_id.hex()[:16]!r} in object {read.name!r} at "
                    f"{wanted.offset_bytes}: {error}",
                ) from error
            use(wanted, blob, payload)

    def _damaged(self, stream: Stream, reason: str) -> IntegrityError:
        of = f" of snapshot {self._snapshot_id[:8]!r}" if self._snapshot_id else ""
        return IntegrityError(f"stream {stream.name!r}{of} is damaged: {reason}")


class _Tools:
    """What a thread needs for one read, and any thread uses again for another."""

    def __init__(self) -> None:
        self.decoder = Decoder(reuses_memory=True)
        self.memory = Memory()


def _windows(extents: list[Row], window_bytes: int) -> Iterator[list[Row]]:
    window: list[Row] = []
    size_bytes = 0
    for extent in extents:
        if window and size_bytes + extent[1] > window_bytes:
            yield window
            window, size_bytes = [], 0
        window.append(extent)
        size_bytes += extent[1]
    if window:
        yield window


def _targets(
    extents: list[Row], mapping: Sequence[Mapping]
) -> dict[int, list[tuple[int, int, int]]]:
    """Return for each extent's offset the (start, end, file offset) parts that are wanted."""
    targets: dict[int, list[tuple[int, int, int]]] = {}
    number = 0
    for begin, size_bytes, _ in extents:
        end = begin + size_bytes
        while number < len(mapping) and (
            mapping[number].offset_bytes + mapping[number].size_bytes <= begin
        ):
            number += 1
        parts = []
        for piece in _from(mapping, number):
            if piece.offset_bytes >= end:
                break
            start = max(piece.offset_bytes, begin)
            stop = min(piece.offset_bytes + piece.size_bytes, end)
            if start < stop:
                target = piece.target_bytes + start - piece.offset_bytes
                parts.append((start - begin, stop - begin, target))
        if parts:
            targets[begin] = parts
    return targets


def _from(mapping: Sequence[Mapping], number: int) -> Iterator[Mapping]:
    while number < len(mapping):
        yield mapping[number]
        number += 1


def _write_at(fd: int, data: Buffer, offset_bytes: int) -> None:
    view = memoryview(data)
    while len(view):
        try:
            written = os.pwrite(fd, view, offset_bytes)
        except OSError as error:
            raise TorchmigError(f"cannot write restored bytes: {error.strerror}") from error
        view = view[written:]
        offset_bytes += written
