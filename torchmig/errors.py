"""The exception tree, each class with the exit code that the command line returns.

TorchmigError (1)
├── UsageError (2)
├── RepositoryNotFoundError (10)
├── RepositoryLockedError (11)
├── SnapshotNotFoundError (12)
├── HostUnfitError (20)
├── SnapshotUnfitError (21)
├── IntegrityError (22)
├── DeadlineMissedError (23)
├── RequestWithdrawnError (1)
└── StoreError (1)
    ├── ObjectMissingError (1)
    └── TransientStoreError (1)

A message says what failed, on what, why, and what to do: lower-case start, no full stop, values
quoted.
"""

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every torchmig program."""

    OK = 0
    FAILED = 1  # as torchrun
    USAGE = 2
    NO_REPOSITORY = 10
    LOCKED = 11
    NO_SNAPSHOT = 12
    HOST_UNFIT = 20  # this host cannot checkpoint
    SNAPSHOT_UNFIT = 21  # the snapshot does not fit this host
    INTEGRITY = 22
    DEADLINE = 23
    SUSPENDED = 85  # suspended, resume me
    INTERRUPTED = 130
    TERMINATED = 143


class TorchmigError(Exception):
    """Anything torchmig says no to."""

    exit_code = ExitCode.FAILED

    def inside(self, what: str) -> None:
        """Put before the message what has failed because of it."""
        self.args = (f"{what}: {self}",)


class UsageError(TorchmigError):
    """The command line or the configuration is wrong."""

    exit_code = ExitCode.USAGE


class RepositoryNotFoundError(TorchmigError):
    """There is no repository at the address."""

    exit_code = ExitCode.NO_REPOSITORY


class RepositoryLockedError(TorchmigError):
    """Somebody else holds a lock that excludes this operation."""

    exit_code = ExitCode.LOCKED


class SnapshotNotFoundError(TorchmigError):
    """No snapshot has this id, or several share this prefix."""

    exit_code = ExitCode.NO_SNAPSHOT


class HostUnfitError(TorchmigError):
    """This host cannot checkpoint: rights, kernel, CRIU, driver or a refused feature."""

    exit_code = ExitCode.HOST_UNFIT


class SnapshotUnfitError(TorchmigError):
    """The snapshot does not fit this host."""

    exit_code = ExitCode.SNAPSHOT_UNFIT


class IntegrityError(TorchmigError):
    """Stored bytes do not match their name."""

    exit_code = ExitCode.INTEGRITY


class DeadlineMissedError(TorchmigError):
    """The request did not come to its end in time and was withdrawn."""

    exit_code = ExitCode.DEADLINE


class RequestWithdrawnError(TorchmigError):
    """A checkpoint or suspend was called off; the job trains on."""

    exit_code = ExitCode.FAILED


class StoreError(TorchmigError):
    """A store failed for good: trying again will not help."""

    exit_code = ExitCode.FAILED


class ObjectMissingError(StoreError):
    """A store has no object of this name."""


class TransientStoreError(StoreError):
    """A store failed in a way that may pass: trying again can help."""


def to_message(error: Exception) -> dict[str, str]:
    """Return an error in the form in which another process hears of it.

    An error that is none of the tree, which nobody has foreseen, becomes the root of it.
    """
    if not isinstance(error, TorchmigError):
        return {"kind": TorchmigError.__name__, "error": f"{type(error).__name__}: {error}"}
    known = (kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return {"kind": next(known).__name__, "error": str(error)}


def from_message(message: Mapping[str, str]) -> TorchmigError:
    """Return the error that another process has had."""
    kind = globals().get(message["kind"])
    if not (isinstance(kind, type) and issubclass(kind, TorchmigError)):
        kind = TorchmigError
    return kind(message["error"])
