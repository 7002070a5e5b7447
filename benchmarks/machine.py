"""On what something was measured, for every file of raw figures."""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "benchmarks"


def describe() -> dict[str, Any]:
    """Return the machine, the releases and the commit."""
    processors = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(": ")[1] for line in processors if "model name" in line), "unknown")
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": model,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "driver": _driver(),
        "commit": commit.stdout.strip() or "unknown",
    }


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write raw figures with the machine they belong to, and return the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **figures}, indent=2), encoding="utf-8")
    return path


def say(what: str) -> None:
    """Say how far a measurement is that takes minutes."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
