"""What tests need from their machine: a marker names it, a skip says what of it is missing.

TORCHMIG_REQUIRE=criu,s3 turns the skips of these markers into failures, for machines that must not
lose tests in silence.
"""

import functools
import os
import shutil
import sys
from pathlib import Path

import pytest

from torchmig.criu import Criu, find_criu
from torchmig.errors import HostUnfitError
from torchmig.host import Where, require_fit

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def missing_gpus(wanted: int) -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVIDIA driver ({error})"
    found = pynvml.nvmlDeviceGetCount()
    return None if found >= wanted else f"{found} of {wanted} NVIDIA GPUs"


@functools.cache
def missing_criu() -> str | None:
    try:
        require_fit(Where(os.environ.get("TORCHMIG_CRIU"), None, "/run/torchmig"))
    except HostUnfitError as error:
        return str(error)
    return None


@functools.cache
def missing_s3() -> str | None:
    beside = Path(sys.executable).parent
    if shutil.which("weed", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"):
        return None
    return "no S3 server: the program 'weed' is neither in the environment nor on PATH"


NEEDS = {
    "gpu": lambda: missing_gpus(1),
    "multigpu": lambda: missing_gpus(2),
    "criu": missing_criu,
    "s3": missing_s3,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = os.environ.get("TORCHMIG_REQUIRE", "").split(",")
    for marker, look in NEEDS.items():
        if item.get_closest_marker(marker) is None:
            continue
        missing = look()
        if missing is not None and marker in required:
            pytest.fail(f"{marker} is required here, but: {missing}")
        if missing is not None:
            pytest.skip(missing)


@pytest.fixture
def criu() -> Criu:
    """The CRIU that tests marked criu use."""
    return find_criu(os.environ.get("TORCHMIG_CRIU"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the developer's own settings out; what set-up passes on stays."""
    kept = ("TORCHMIG_CRIU", "TORCHMIG_REQUIRE", "TORCHMIG_PYTHON", "TORCHMIG_DEBIAN_MIRROR")
    for name in list(os.environ):
        if name.startswith("TORCHMIG_") and not name.startswith(("TORCHMIG_TEST_", *kept)):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
