# The extension's functions are checked where they are called, by the tests that call them.
from typing import Any

def __getattr__(name: str) -> Any: ...
