"""How a caller hears of bytes as they are done."""

from collections.abc import Callable

Advance = Callable[[int], None]
"""Told of a number of bytes, from any thread."""


def unheard(size_bytes: int) -> None:
    """Tell nobody."""
