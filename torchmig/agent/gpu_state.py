"""What a rank's section of a manifest says of GPUs."""

from torchmig.capture.device.blocks import from_state
from torchmig.capture.device.windows import Block
from torchmig.repo import RankSection

STATE = "gpu"  # its key in the section


def blocks_of(section: RankSection) -> list[Block]:
    """Return the GPU blocks that a rank had."""
    state = section.state.get(STATE) or {}
    return from_state(state["blocks"]) if state else []


def uses_gpus(section: RankSection) -> bool:
    """Return whether a rank had GPU state."""
    return bool((section.state.get(STATE) or {}).get("facts", {}).get("devices"))
