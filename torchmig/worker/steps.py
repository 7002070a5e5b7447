"""Tells the gate where optimizer steps end: the moment with the fewest live bytes."""

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torchmig import _C


def install() -> None:
    """Hook every optimizer, those of scripts that define their own class included."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(_optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    _C.boundary()
