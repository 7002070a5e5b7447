"""From what the user writes as a repository's address to a store.

Credentials are not part of an address: it shows up in process lists, logs and manifests.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from torchmig.errors import UsageError
from torchmig.store.base import Store
from torchmig.store.folder import FolderStore
from torchmig.store.retry import RetryingStore, RetryPolicy


def open_store(address: str, policy: RetryPolicy | None = None) -> Store:
    """Return the store at a path, a `file:///…` URL or an `s3://bucket/prefix` URL.

    Passing failures are tried again as `policy` says. Nothing is contacted yet.
    """
    return RetryingStore(_plain_store(address), policy)


def absolute(address: str) -> str:
    """Return an address that means the same to programs in other folders; bad ones stay as bad."""
    return address if "://" in address or not address else str(Path(address).absolute())


def _plain_store(address: str) -> Store:
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
    if scheme == "s3":
        # Imported late: the SDK takes a quarter of a second, and folders do not need it.
        from torchmig.store.s3 import S3Store

        if not parts.netloc or parts.port is not None:
            raise UsageError(
                f"cannot use {address!r}: write s3://bucket/prefix and the server as "
                "AWS_ENDPOINT_URL=http(s)://host:port"
            )
        return S3Store(parts.netloc, unquote(parts.path).strip("/"))
    raise UsageError(f"cannot use {address!r}: {scheme!r} is no kind of repository (file, s3)")
