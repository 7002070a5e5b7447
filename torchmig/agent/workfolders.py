"""Folders for what is on its way between ranks and the repository.

They hold the memory of a job. Each is removed by the agent that made it, and if that was killed by
the next agent on the same host.
"""

import contextlib
import logging
import os
import re
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torchmig.agent.claims import Claim, claim, remove_unclaimed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkFolder:
    """One folder, private to this agent."""

    path: Path
    _claim: Claim | None

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._claim is not None:
            self._claim.release()


def root(work_dir: str | None) -> Path:
    """Return where work folders are made: in the folder that the user names, made if missing."""
    if work_dir is None:
        return Path(tempfile.gettempdir())
    path = Path(work_dir)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def make(work_dir: str | None) -> WorkFolder:
    """Make a new one."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-", dir=root(work_dir)))
        try:
            held = claim(path)
        except FileNotFoundError:
            continue  # swept before it was locked
        except OSError as error:
            log.debug("'%s' is not locked, and nobody will sweep it: %s", path, error)
            return WorkFolder(path, None)
        if held is not None:
            return WorkFolder(path, held)


def sweep(work_dir: str | None) -> None:
    """Remove what agents of this user on this host have left that were killed."""
    folder = Path(work_dir or tempfile.gettempdir())
    name = re.compile(rf"{re.escape(_prefix())}\d+-\w+")
    try:
        found = [entry for entry in os.scandir(folder) if name.fullmatch(entry.name)]
    except OSError:
        return  # there is no such folder yet
    for entry in found:
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            if own and entry.is_dir(follow_symlinks=False):
                remove_unclaimed(Path(entry.path))


def _prefix() -> str:
    # A folder may be shared by hosts that do not see each other's locks.
    return f"torchmig-{socket.gethostname()}-"
