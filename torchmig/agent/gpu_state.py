"""What a rank's section of a manifest says of GPUs."""

from typing import Any

from torchmig.capture.device.blocks import from_state
from torchmig.capture.device.windows import Block
from torchmig.repo import RankSection

STATE = "gpu"  # its key in the section


def state_of(section: RankSection) -> dict[str, Any]:
    """Return all of it; empty if the rank had none."""
    return section.state.get(STATE) or {}


def blocks_of(section: RankSection) -> list[Block]:
    """Return the GPU blocks that a rank had."""
    state = state_of(section)
    return from_state(state["blocks"]) if state else []


def uses_gpus(section: RankSection) -> bool:
    """Return whether a rank had GPU state."""
    return bool(state_of(section).get("facts", {}).get("devices"))
