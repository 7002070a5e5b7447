"""What fails in a run with the stand-in: the words in the file that STAND_IN_FAULTS names."""

import os
from pathlib import Path

_FILE = Path(os.environ.get("STAND_IN_FAULTS", "/nothing"))


def fails(what):
    return _FILE.exists() and what in _FILE.read_text().split()


def any_fails():
    return _FILE.exists() and bool(_FILE.read_text())
