"""What a suspend and a restore of one GPU process cost, beside the driver's checkpoint with CRIU.

    python -m benchmarks.gpu_h200 [copy] [fill16] [fill32] [gpt]

Needs an NVIDIA GPU with a driver of 580 or newer, CRIU and root. Each part checks what it measures
and ends inside a few minutes. A table is printed last; raw figures go to build/benchmarks.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import suspension  # noqa: E402
import torch  # noqa: E402

from benchmarks import machine  # noqa: E402
from torchmig import _C  # noqa: E402

GIB = 1 << 30
STEPS = 6
PARTS = ("copy", "fill16", "fill32", "gpt")


def copy() -> dict[str, Any]:
    """Rates of copies through staging and of plain pinned ones, in GB/s."""
    size, plain = 8 * GIB, GIB
    device = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(plain, dtype=torch.uint8).pin_memory()
    begun = time.perf_counter()
    with suspension.new_staging(size) as staging:
        touched = time.perf_counter() - begun
        address = device.data_ptr()
        pieces = [(address + at, 4 << 20, at) for at in range(0, size, 4 << 20)]
        before = device[::4097].clone()
        figures = {
            "plain_out": _rate(plain, lambda: pinned.copy_(device[:plain], non_blocking=True)),
            "plain_in": _rate(plain, lambda: device[:plain].copy_(pinned, non_blocking=True)),
            "staging_out": _rate(size, lambda: _C.copy_pieces(True, 0, staging.fd, pieces)),
        }
        device.zero_()
        figures["staging_in"] = _rate(size, lambda: _C.copy_pieces(False, 0, staging.fd, pieces))
        assert torch.equal(device[::4097], before)
        figures["touch_gb_s"] = size / 1e9 / touched
        figures["huge_share"] = staging.huge_bytes / size
    return figures


def _rate(size: int, action: Any) -> float:
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        action()
        torch.cuda.synchronize()
        best = max(best, size / 1e9 / (time.perf_counter() - begun))
    return best


def compare(kind: str, staging_bytes: int) -> dict[str, Any]:
    """One suspend and restore each way, both bit-identical to the unbroken run."""
    folder = Path(tempfile.mkdtemp(prefix="torchmig-bench-"))
    try:
        ours = suspension.job_environment()
        unbroken = suspension.Job(kind, STEPS, folder / "unbroken", ours).end()
        machine.say(f"{kind}: run unbroken")
        job = suspension.Job(kind, STEPS, folder / "ours", ours, stop=2)
        try:
            with suspension.new_staging(staging_bytes) as staging:
                job.wait_parked()
                socket, images = folder / "staging.sock", folder / "images"
                flat = suspension.take_out(job, images, staging, socket)
                suspension.bring_back(job, images, staging, socket, flat)
                job.go()
            assert job.end() == unbroken
        finally:
            job.kill()
        machine.say(f"{kind}: suspended and restored")
        suspension.remove(images)
        beside = stock(kind, folder, unbroken)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"ours": job.times | job.sizes, "stock": beside}


def stock(
    kind: str,
    folder: Path,
    unbroken: str | None,
    between: Callable[[Path], None] = lambda images: None,
) -> dict[str, Any]:
    """Suspend and restore the job's process by driver and CRIU alone.

    Args:
        kind: Of the job.
        folder: Takes it and its images.
        unbroken: What the job's log has to be; it is not compared if this is not known.
        between: Called with the folder of the images before they are read again.
    """
    images = folder / "stock-images"
    environment = suspension.job_environment(arena=False)
    job = suspension.Job(kind, STEPS, folder / "stock", environment, stop=2)
    try:
        job.wait_parked()
        with job.timed("release_total"):
            job.ask("close_nvml")
            suspension.dump(job, images)
        machine.say(f"{kind}: suspended by driver and CRIU")
        between(images)
        with job.timed("resume_total"):
            suspension.undump(job, images)
            job.ask("reopen_nvml")
        job.go()
        log = job.end()
        assert unbroken in (None, log)
    finally:
        job.kill()
        suspension.remove(images)
    return {**job.times, **job.sizes}


def row(name: str, figures: dict[str, Any]) -> str:
    """Return one comparison as a line of the table."""
    ours, stock = figures["ours"], figures["stock"]
    stored = ours["live"] + ours["image"]
    return (
        f"| {name} | {ours['live'] / GIB:.2f} GiB | {stock['release_total']:.2f} s | "
        f"{ours['release_total']:.2f} s | {stock['release_total'] / ours['release_total']:.1f} | "
        f"{stock['resume_total']:.2f} s | {ours['resume_total']:.2f} s | "
        f"{stock['resume_total'] / ours['resume_total']:.1f} | {stock['image'] / GIB:.2f} GiB | "
        f"{stored / GIB:.2f} GiB |"
    )


def main(parts: list[str]) -> None:
    """Run the named parts, or all."""
    results: dict[str, Any] = {}
    lines = []
    for part in parts or PARTS:
        begun = time.monotonic()
        if part == "copy":
            results[part] = copy()
        else:
            staging = (int(part[4:]) + 1) * GIB if part.startswith("fill") else 8 * GIB
            results[part] = compare(part, staging)
            lines.append(row(part, results[part]))
            print(part, results[part], flush=True)
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    print(machine.save("gpu_h200", results))
    if "copy" in results:
        r = results["copy"]
        print(
            f"copy: out {r['staging_out']:.1f} of {r['plain_out']:.1f} GB/s "
            f"({r['staging_out'] / r['plain_out']:.0%}), in {r['staging_in']:.1f} of "
            f"{r['plain_in']:.1f} GB/s ({r['staging_in'] / r['plain_in']:.0%}), "
            f"touching {r['touch_gb_s']:.1f} GB/s with {os.cpu_count()} threads"
        )
    if lines:
        print(
            "| job | live | stock release | release | times | stock resume | resume | times "
            "| stock image | stored |"
        )
        print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
