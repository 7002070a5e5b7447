"""The index: which blob lies where in which pack.

Index objects repeat the headers of packs, so that they can be rebuilt from the packs. In memory a
blob is one dictionary entry whose value packs the whole location into one integer: about 170 bytes,
where a small object for each blob would take three times that.
"""

import threading
from collections.abc import Container, Iterator
from typing import NamedTuple

import msgpack

from torchmig.errors import IntegrityError
from torchmig.repo.blob import ID_BYTES, MAX_BLOB_BYTES, hash_of
from torchmig.repo.fetch import fetch_all
from torchmig.repo.pack import ENTRY, pack_name
from torchmig.store import Store

INDEX_PREFIX = "index"
_VERSION = 1
_SIZE_BITS = 27
_OFFSET_BITS = 32
_CODEC_BITS = 4
_SIZE_MASK = (1 << _SIZE_BITS) - 1
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_CODEC_MASK = (1 << _CODEC_BITS) - 1


class Location(NamedTuple):
    """Where a blob lies and how it is stored."""

    pack_id: bytes
    offset_bytes: int
    stored_bytes: int
    size_bytes: int
    codec: int


class Index:
    """The blobs of a repository, as far as index objects and this process's writers tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._locations: dict[bytes, int] = {}
        self._packs: list[bytes] = []
        self._pack_numbers: dict[bytes, int] = {}
        self._loaded: set[str] = set()

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, blob_id: bytes) -> bool:
        return blob_id in self._locations

    def known(self) -> Container[bytes]:
        """Return the ids of all blobs, for many questions at once; valid until a refresh."""
        return self._locations

    def find(self, blob_id: bytes) -> Location | None:
        """Return where a blob lies, or None if no index names it."""
        packed = self._locations.get(blob_id)
        if packed is None:
            return None
        codec = packed & _CODEC_MASK
        packed >>= _CODEC_BITS
        size_bytes = packed & _SIZE_MASK
        packed >>= _SIZE_BITS
        stored_bytes = packed & _SIZE_MASK
        packed >>= _SIZE_BITS
        offset_bytes = packed & _OFFSET_MASK
        pack_id = self._packs[packed >> _OFFSET_BITS]
        return Location(pack_id, offset_bytes, stored_bytes, size_bytes, codec)

    def pack_ids(self) -> list[bytes]:
        """Return the packs that the index names."""
        return list(self._packs)

    def add_pack(self, pack_id: bytes, header: bytes) -> None:
        """Take in the blobs of one pack; the header must match the pack's name."""
        if hash_of(header) != pack_id or len(header) % ENTRY.size:
            raise IntegrityError(
                f"the index entry of pack {pack_name(pack_id)!r} does not match its name"
            )
        with self._lock:
            if pack_id in self._pack_numbers:
                return
            number = len(self._packs)
            self._packs.append(pack_id)
            self._pack_numbers[pack_id] = number
            locations = self._locations
            offset_bytes = 0
            for blob_id, _, codec, size_bytes, stored_bytes in ENTRY.iter_unpack(header):
                if (
                    size_bytes > MAX_BLOB_BYTES
                    or stored_bytes > MAX_BLOB_BYTES
                    or offset_bytes > _OFFSET_MASK
                    or codec > _CODEC_MASK
                ):
                    raise IntegrityError(
                        f"pack {pack_name(pack_id)!r} names a blob beyond the format's limits"
                    )
                locations[blob_id] = (
                    (((number << _OFFSET_BITS | offset_bytes) << _SIZE_BITS | stored_bytes)
                    << _SIZE_BITS | size_bytes) << _CODEC_BITS | codec
                )  # fmt: skip
                offset_bytes += stored_bytes

    def refresh(self, store: Store) -> bool:
        """Read the index objects that have come since the last time.

        Returns:
            True if some have gone: a prune has run, and what the index said before may be wrong.
            All of it has then been read anew.
        """
        with self._refresh_lock:
            names = {entry.name for entry in store.list(INDEX_PREFIX)}
            has_shrunk = not self._loaded <= names
            if has_shrunk:
                with self._lock:
                    self._locations, self._packs, self._pack_numbers = {}, [], {}
                self._loaded = set()
            # One that has gone is being replaced by a prune; what replaces it is there already.
            for name, data in fetch_all(store, sorted(names - self._loaded)):
                for pack_id, header in decode_index(name, data):
                    self.add_pack(pack_id, header)
                self._loaded.add(name)
            return has_shrunk

    def note_object(self, name: str) -> None:
        """Take note of an index object whose packs are known already."""
        with self._refresh_lock:
            self._loaded.add(name)


def encode_index(packs: list[tuple[bytes, bytes]]) -> tuple[str, bytes]:
    """Return name and bytes of an index object over (pack id, header) pairs."""
    data = msgpack.packb({"packs": packs, "version": _VERSION}, use_bin_type=True)
    return f"{INDEX_PREFIX}/{hash_of(data).hex()}", data


def decode_index(name: str, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the (pack id, header) pairs of an index object after checking it against its name."""
    if f"{INDEX_PREFIX}/{hash_of(data).hex()}" != name:
        raise IntegrityError(
            f"{name!r} is damaged: its bytes do not match its name; run 'torchmig rebuild-index'"
        )
    try:
        document = msgpack.unpackb(data, raw=False)
        version, packs = document["version"], document["packs"]
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{name!r} is no index: {error!r}") from error
    if version != _VERSION:
        raise IntegrityError(
            f"{name!r} is an index of version {version!r}, but this torchmig reads version "
            f"{_VERSION}; upgrade torchmig"
        )
    if not isinstance(packs, list):
        raise IntegrityError(f"{name!r} is no index: its list of packs is missing")
    for pack in packs:
        if (
            not isinstance(pack, list)
            or [type(item) for item in pack] != [bytes, bytes]
            or len(pack[0]) != ID_BYTES
        ):
            raise IntegrityError(f"{name!r} is no index: it holds an entry of another form")
        yield pack[0], pack[1]
