"""A store on S3 or anything that speaks its protocol, through the minio SDK.

The same object names as in a folder, below a prefix of a bucket. Credentials come from where every
S3 tool looks for them (AWS_* variables, ~/.aws) and never pass through an address. Objects are
small enough (packs of 32 MiB) for one PUT each, so nothing half-written is ever left behind.
"""

import configparser
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.credentials.providers import (
    AWSConfigProvider,
    ChainedProvider,
    EnvAWSProvider,
    IamAwsProvider,
    Provider,
)
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from torchmig.errors import ObjectMissingError, StoreError, TransientStoreError, UsageError
from torchmig.store.base import Buffer, Entry, Store, check_name

_PASSING_CODES = {
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "TooManyRequests",
    "XMinioServerNotInitialized",
}
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_CURES = {
    "AccessDenied": "these credentials lack the right; check the bucket's policy",
    "ExpiredToken": "renew the credentials",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "NoSuchBucket": "make it with 'torchmig init' or correct the address",
    "RequestTimeTooSkewed": "set this host's clock",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
}
_AWS_URL = "https://s3.amazonaws.com"
_AWS_REGION = "us-east-1"
_PIECE_BYTES = 1 << 20
_MAX_CONNECTIONS = 64
_PART_BYTES = 1 << 30  # never reached: below it the SDK sends one PUT


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach a server; the defaults are AWS's own."""

    endpoint_url: str = _AWS_URL
    region: str = _AWS_REGION
    ca_bundle: str | None = None
    connect_timeout_seconds: float = 10.0
    read_timeout_seconds: float = 60.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "S3Options":
        """Read the AWS_* variables, then ~/.aws/config, for what the variables leave open."""
        environment = os.environ if environment is None else environment
        profile = _profile(environment)

        def setting(default: str | None, key: str, *variables: str) -> str | None:
            values = [environment.get(variable) for variable in variables]
            return next((value for value in values if value), None) or profile.get(key) or default

        endpoint = setting(None, "endpoint_url", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        region = setting(None, "region", "AWS_REGION", "AWS_DEFAULT_REGION")
        return cls(
            endpoint_url=endpoint or _AWS_URL,
            region=region or _AWS_REGION,
            ca_bundle=setting(None, "ca_bundle", "AWS_CA_BUNDLE", "SSL_CERT_FILE"),
        )


class S3Store(Store):
    """Objects in a bucket, below a prefix."""

    # One request for each pack: requests cost money and a round trip.
    read_bytes = 32 << 20

    made_on_demand = False  # a bucket has a region, rules and a bill

    def __init__(self, bucket: str, prefix: str, options: S3Options | None = None) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._base = f"{prefix}/" if prefix else ""
        self._options = options or S3Options.from_environment()
        self._lock = threading.Lock()
        self._client: tuple[int, Minio, urllib3.PoolManager] | None = None

    def exists(self) -> bool:
        with self._translated("look for", ""):
            return self._minio().bucket_exists(self.bucket)

    def create(self) -> None:
        with self._translated("make", ""):
            client = self._minio()
            try:
                if not client.bucket_exists(self.bucket):
                    client.make_bucket(self.bucket, location=self._options.region)
            except S3Error as error:
                if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise

    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool = True) -> None:
        body = cast("BinaryIO", _Body(parts))
        size_bytes = sum(len(part) for part in parts)
        with self._translated("write", name):
            self._minio().put_object(
                self.bucket, self._key(name), body, size_bytes, part_size=_PART_BYTES
            )

    def get(self, name: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        if size_bytes == 0:
            return b""
        with self._opened(name, offset_bytes, size_bytes or 0) as response:
            return response.read() if response else b""

    def get_into(self, name: str, offset_bytes: int, buffer: memoryview) -> memoryview:
        if not len(buffer):
            return buffer
        got = 0
        with self._opened(name, offset_bytes, len(buffer)) as response:
            # Small pieces stay in the cache and need no fresh memory: twice as fast as one read.
            for piece in response.stream(_PIECE_BYTES) if response else ():
                buffer[got : got + len(piece)] = piece
                got += len(piece)
        return buffer[:got]

    def list(self, prefix: str) -> Iterator[Entry]:
        start = self._base + (f"{check_name(prefix)}/" if prefix else "")
        with self._translated("list", prefix):
            for item in self._minio().list_objects(self.bucket, prefix=start, recursive=True):
                name = cast("str", item.object_name)
                if item.is_dir or name.endswith("/"):
                    continue
                modified = item.last_modified.timestamp() if item.last_modified else 0.0
                yield Entry(name.removeprefix(self._base), item.size or 0, modified)

    def delete(self, name: str) -> None:
        with self._translated("delete", name):
            try:
                self._minio().remove_object(self.bucket, self._key(name))
            except S3Error as error:
                if error.code != "NoSuchKey":
                    raise

    def sweep(self, older_than_seconds: float) -> int:
        return 0  # a PUT is all or nothing

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client[2].clear()
                self._client = None

    @contextmanager
    def _opened(
        self, name: str, offset_bytes: int, size_bytes: int
    ) -> Iterator[urllib3.BaseHTTPResponse | None]:
        """Open a range of an object; None if the object ends before the range begins."""
        with self._translated("read", name):
            try:
                response = self._minio().get_object(
                    self.bucket, self._key(name), offset=offset_bytes, length=size_bytes
                )
            except (S3Error, InvalidResponseError) as error:
                if _status(error) != 416 and getattr(error, "code", "") != "InvalidRange":
                    raise
                yield None
                return
            try:
                yield response
            finally:
                response.close()
                response.release_conn()

    def _key(self, name: str) -> str:
        return self._base + check_name(name)

    def _minio(self) -> Minio:
        # The SDK's connections must not be shared over a fork.
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                self._client = (os.getpid(), *_connect(self._options))
            return self._client[1]

    @contextmanager
    def _translated(self, verb: str, name: str) -> Iterator[None]:
        """Turn what the SDK raises into the errors of the store contract."""
        what = f"{name!r} in {self.url!r}" if name else f"{self.url!r}"
        where = f"cannot {verb} {what} on {self._options.endpoint_url}"
        try:
            yield
        except S3Error as error:
            if error.code in ("NoSuchKey", "NoSuchObject"):
                raise ObjectMissingError(f"{where}: not there") from error
            cure = _CURES.get(error.code or "")
            reason = (error.message or error.code or "refused").rstrip(".") + (
                f"; {cure}" if cure else ""
            )
            passing = error.code in _PASSING_CODES or _status(error) in _PASSING_STATUS
            kind = TransientStoreError if passing else StoreError
            raise kind(f"{where}: {reason}") from error
        except (ServerError, InvalidResponseError) as error:
            status = _status(error)
            if status == 404 and verb == "read":  # said without the XML that S3 sends
                raise ObjectMissingError(f"{where}: not there") from error
            kind = TransientStoreError if status in _PASSING_STATUS else StoreError
            raise kind(f"{where}: the server answered with status {status}") from error
        except urllib3.exceptions.HTTPError as error:
            reason = _http_reason(error)
            passing = not isinstance(_cause(error), urllib3.exceptions.SSLError)
            kind = TransientStoreError if passing else StoreError
            raise kind(f"{where}: {reason}") from error
        except (MinioException, ValueError) as error:
            raise StoreError(f"{where}: {error}") from error
        except OSError as error:  # a socket that broke outside urllib3's own care
            raise TransientStoreError(f"{where}: {error}") from error


class _Body:
    """Hands the parts of an object to the SDK, which asks for all of it in one read."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = parts
        self._read = False

    def read(self, size_bytes: int = -1) -> bytes:
        if self._read:
            return b""
        self._read = True
        return b"".join(self._parts)


def _connect(options: S3Options) -> tuple[Minio, urllib3.PoolManager]:
    parts = urlsplit(options.endpoint_url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.username:
        raise UsageError(
            f"cannot use the S3 endpoint {parts.scheme}://{parts.hostname}: "
            "write AWS_ENDPOINT_URL as http(s)://host:port, without credentials"
        )
    if options.ca_bundle and not Path(options.ca_bundle).is_file():
        raise UsageError(f"cannot read the CA bundle {options.ca_bundle!r}: there is no such file")
    http = urllib3.PoolManager(
        timeout=urllib3.Timeout(
            connect=options.connect_timeout_seconds, read=options.read_timeout_seconds
        ),
        retries=False,  # the retrying wrapper decides, for all stores alike
        maxsize=_MAX_CONNECTIONS,
        cert_reqs="CERT_REQUIRED",
        ca_certs=options.ca_bundle,
    )
    client = Minio(
        parts.netloc,
        secure=parts.scheme == "https",
        region=options.region,
        credentials=_credentials(),
        http_client=http,
    )
    return client, http


def _credentials() -> Provider:
    providers: list[Provider] = [EnvAWSProvider(), AWSConfigProvider()]
    if any(
        os.environ.get(variable)
        for variable in (
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
        )
    ):
        providers.append(IamAwsProvider())
    chain = ChainedProvider(providers)  # passes over those that raise ValueError
    try:
        chain.retrieve()
    except ValueError as error:
        raise UsageError(
            "cannot find S3 credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "or write ~/.aws/credentials"
        ) from error
    return chain


def _profile(environment: Mapping[str, str]) -> Mapping[str, str]:
    path = environment.get("AWS_CONFIG_FILE") or str(
        Path(environment.get("HOME", "/")) / ".aws" / "config"
    )
    name = environment.get("AWS_PROFILE") or "default"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path!r}: {error}") from error
    for section in (name, f"profile {name}"):
        if parser.has_section(section):
            return dict(parser.items(section))
    return {}


def _status(error: MinioException) -> int:
    if isinstance(error, ServerError):
        return error.status_code
    if isinstance(error, S3Error):
        return int(getattr(error.response, "status", 0) or 0)
    return int(getattr(error, "_code", 0))  # the SDK gives no other way to the status


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    return error


def _http_reason(error: urllib3.exceptions.HTTPError) -> str:
    cause = _cause(error)
    if isinstance(cause, urllib3.exceptions.NewConnectionError):
        return "the server cannot be reached"
    if isinstance(cause, urllib3.exceptions.TimeoutError):
        return "the server did not answer in time"
    if isinstance(cause, urllib3.exceptions.SSLError):
        return f"the server's certificate is not accepted ({cause}); see AWS_CA_BUNDLE"
    return f"the connection broke ({type(cause).__name__})"
