"""Bytes by name, in a folder or on S3: the lowest layer, which knows nothing of snapshots."""

from torchmig.store.address import absolute, open_store
from torchmig.store.base import Buffer, Entry, Store
from torchmig.store.folder import FolderStore
from torchmig.store.retry import RetryingStore, RetryPolicy

__all__ = [
    "Buffer",
    "Entry",
    "FolderStore",
    "RetryPolicy",
    "RetryingStore",
    "Store",
    "absolute",
    "open_store",
]
