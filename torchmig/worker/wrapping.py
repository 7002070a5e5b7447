"""Puts a function of ours around one of torch's, in its place."""

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace an attribute that can be called; `around` gets the original, then the arguments."""
    original = getattr(owner, name)

    # The attributes stay those of the original: torch looks at signatures and names.
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
