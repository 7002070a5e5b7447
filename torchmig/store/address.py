"""From what the user writes as a repository's address to a store.

Credentials are not part of an address: it shows up in process lists, logs and manifests.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from torchmig.errors import UsageError
from torchmig.store.base import Store
from torchmig.store.folder import FolderStore


def open_store(address: str) -> Store:
    """Return the store at a path, a `file:///…` URL or an `s3://bucket/prefix` URL.

    Nothing is contacted yet.
    """
    if not address:
        raise UsageError("cannot open a repository: the address is empty")
    scheme, separator, _ = address.partition("://")
    if not separator:
        return FolderStore(Path(address).absolute())
    parts = urlsplit(address)
    if parts.username or parts.password:
        raise UsageError(
            f"cannot use a {scheme} address with credentials in it; "
            "put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws/credentials"
        )
    if parts.query or parts.fragment:
        raise UsageError(f"cannot use {address!r}: an address has no '?' or '#' part")
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise UsageError(f"cannot use {address!r}: write file:///absolute/path")
        return FolderStore(Path(unquote(parts.path)))
    raise UsageError(f"cannot use {address!r}: {scheme!r} is no kind of repository (file, s3)")
