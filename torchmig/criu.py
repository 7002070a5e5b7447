"""Where CRIU and the pycriu of the same release are on this host.

Distributions ship releases that are too old for today's kernels, and pycriu is in no Python package
index, so both are searched: the one that was named, the one on PATH, the private prefix of a
checkout. pycriu is loaded from its own folder, since the folder around it may hold a whole other
Python's packages.
"""

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torchmig.errors import HostUnfitError
from torchmig.units import version_numbers

OLDEST_RELEASE = (4, 1)  # the first that knows the vDSO layout of kernel 6.13 and newer
_SOCKETS_ANYWHERE = (4, 2)
_SOCKETS_CHANGED = (6, 16)  # of Linux: SO_PASSCRED is for local sockets alone
PREFIX = Path(__file__).resolve().parents[1] / ".criu"
_CURE = "run 'make setup', or name a criu of 4.1 or newer in TORCHMIG_CRIU"


@dataclass(frozen=True)
class Criu:
    """A CRIU that torchmig can use."""

    path: Path
    version: str
    pycriu_folder: Path

    def reads(self, version: str) -> bool:
        """Return whether it takes images of this release: of its own and of older ones."""
        return _release(version) <= _release(self.version)

    @property
    def takes_sockets(self) -> bool:
        """Whether it can dump internet sockets: Linux 6.16 has taken away what older ones ask."""
        kernel = _release(platform.release())
        return _release(self.version) >= _SOCKETS_ANYWHERE or kernel < _SOCKETS_CHANGED


def find_criu(named: str | None = None) -> Criu:
    """Return the CRIU to use.

    Args:
        named: Program or path given by the user; then no other is looked for.

    Raises:
        HostUnfitError: There is none that is new enough and has its pycriu.
    """
    reasons = []
    for candidate in _candidates(named):
        try:
            return _examine(candidate)
        except HostUnfitError as error:
            reasons.append(str(error))
    if not reasons:
        reasons = [f"no criu on PATH and none in '{PREFIX}'"]
    raise HostUnfitError(f"cannot use CRIU: {'; '.join(reasons)}; {_CURE}")


def load_pycriu(criu: Criu) -> ModuleType:
    """Import the pycriu that belongs to a CRIU and return it.

    Raises:
        HostUnfitError: It cannot be imported.
    """
    loaded = sys.modules.get("pycriu")
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(
        "pycriu",
        criu.pycriu_folder / "__init__.py",
        submodule_search_locations=[str(criu.pycriu_folder)],
    )
    if spec is None or spec.loader is None:
        raise HostUnfitError(f"cannot load pycriu from '{criu.pycriu_folder}'; {_CURE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pycriu"] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # protobuf answers generated code that is older or newer than itself with any exception.
        del sys.modules["pycriu"]
        raise HostUnfitError(
            f"cannot load pycriu from '{criu.pycriu_folder}': {error}; "
            "install protobuf 5 beside torchmig"
        ) from error
    return module


def _candidates(named: str | None) -> Iterator[Path]:
    if named is not None:
        yield Path(shutil.which(named) or named)
        return
    on_path = shutil.which("criu")
    if on_path is not None:
        yield Path(on_path)
    in_prefix = PREFIX / "usr" / "sbin" / "criu"
    if in_prefix.exists():
        yield in_prefix


def _examine(path: Path) -> Criu:
    version = _version(path)
    if _release(version) < OLDEST_RELEASE:
        raise HostUnfitError(f"'{path}' is {version}, older than 4.1")
    for folder in _pycriu_folders(path):
        found = _pycriu_version(folder)
        if found is not None and found.split(".")[:2] == version.split(".")[:2]:
            return Criu(path, version, folder)
    raise HostUnfitError(f"'{path}' is {version}, but no pycriu of that release is installed")


def _release(version: str) -> tuple[int, ...]:
    return version_numbers(version)[:2]


def _version(path: Path) -> str:
    try:
        # Its own warnings about the kernel go to standard error and say nothing about the release.
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostUnfitError(f"'{path}' does not start: {error}") from error
    match = re.search(r"Version:\s*(\d+\.\d+(?:\.\d+)*)", answer.stdout)
    if match is None:
        raise HostUnfitError(
            f"'{path} --version' ended with {answer.returncode} and names no version"
        )
    return match[1]


def _pycriu_folders(criu: Path) -> Iterator[Path]:
    installed = importlib.util.find_spec("pycriu")
    if installed is not None and installed.origin is not None:
        yield Path(installed.origin).parent
    roots = [parent for parent in criu.resolve().parents if parent.name in ("usr", "local")]
    for root in [*roots, Path("/usr/local"), Path("/usr")]:
        yield from sorted(root.glob("lib/python3*/*-packages/pycriu"))


def _pycriu_version(folder: Path) -> str | None:
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    return match[1] if match is not None else None
