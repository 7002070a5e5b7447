"""Folders that belong to a running agent.

A lock in the folder says so. It goes with the agent, however that ends, so that whatever nobody
holds a lock of may be removed.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

_LOCK = "lock"


class Claim:
    """The lock of a folder, held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def released(self) -> bool:
        """Whether the folder may be another agent's by now."""
        return self._descriptor < 0

    def release(self) -> None:
        """Give the folder up; may be called twice."""
        if not self.released:
            os.close(self._descriptor)
            self._descriptor = -1


def claim(folder: Path) -> Claim | None:
    """Take the lock of a folder that is there; None if another agent has it.

    Raises:
        FileNotFoundError: The folder has been removed.
        OSError: There is no locking here.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        taken = Claim(os.open(_LOCK, flags, 0o600, dir_fd=directory))
        try:
            fcntl.flock(taken._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been removed between the opening and the locking.
            if (folder / _LOCK).stat().st_ino != os.fstat(taken._descriptor).st_ino:
                raise FileNotFoundError(folder)
        except BlockingIOError:
            taken.release()
            return None
        except OSError:
            taken.release()
            raise
        return taken
    finally:
        os.close(directory)


def remove_unclaimed(folder: Path) -> None:
    """Remove a folder, unless an agent has it."""
    with contextlib.suppress(OSError):  # gone already, or not to be locked
        taken = claim(folder)
        if taken is not None:
            shutil.rmtree(folder, ignore_errors=True)
            taken.release()
