"""What the repository asks of a place that keeps bytes by name.

The repository only ever needs whole objects written once, ranged reads, listings and deletes, so
that a folder, S3 and whatever comes later can be told apart by nothing but speed. What is added to
a store (retries, a cache, faults in tests) wraps it and keeps this contract.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchmig.errors import StoreError

Buffer: TypeAlias = bytes | bytearray | memoryview

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing; the time is the store's own clock, never this host's."""

    name: str
    size_bytes: int
    modified_seconds: float


class Store(ABC):
    """Bytes by name. All methods may be called from several threads at once.

    Failures are `StoreError`: `ObjectMissingError` when there is no such object,
    `TransientStoreError` when the same call may work later, anything else is for good.
    """

    url: str
    """The address as the user would write it; holds no credentials."""

    read_bytes: int
    """The size of a ranged read beyond which larger ones gain nothing."""

    made_on_demand = True
    """Whether whoever writes first may make the place; otherwise `torchmig init` has to."""

    @abstractmethod
    def exists(self) -> bool:
        """Tell whether the place itself (folder, bucket) is there."""

    @abstractmethod
    def create(self) -> None:
        """Make the place; fine if it is there already."""

    @abstractmethod
    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool = True) -> None:
        """Write the parts, joined, as one object: durable on return, all or nothing.

        An object of that name is replaced. No part is kept after return. With `durable` false the
        object may be lost with the power, which is right for what only means something until then.
        """

    @abstractmethod
    def get(self, name: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Read a range, by default all; shorter than asked for if the object ends before."""

    def get_into(self, name: str, offset_bytes: int, buffer: memoryview) -> memoryview:
        """Read as many bytes as the buffer has, into it if that is faster than into new memory.

        Returns the bytes, wherever they are; fewer if the object ends before.
        """
        return memoryview(self.get(name, offset_bytes, len(buffer)))

    def expect(self, name: str, offset_bytes: int, size_bytes: int) -> None:  # noqa: B027
        """Be told of a range that will be read soon, in the order of reading; may do nothing."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects under `prefix` (a folder name, or "" for all) in any order."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; fine if it is not there."""

    @abstractmethod
    def sweep(self, older_than_seconds: float) -> int:
        """Remove what broken puts left behind and return how many bytes that freed."""

    def close(self) -> None:  # noqa: B027  (most stores hold nothing that must be closed)
        """Give up connections; the store may not be used afterwards."""


def check_name(name: str) -> str:
    """Return `name` if it is a legal object name, else raise: no name leads out of a store."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise StoreError(f"cannot use {name!r} as an object name: only a-z 0-9 . _ - and / may be")
    return name
