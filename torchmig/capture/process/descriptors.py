"""What a process has open, by the kernel's own names."""

from collections.abc import Iterator
from pathlib import Path


def descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """Yield (number, target) of each open descriptor; nothing for a process that has ended."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            yield link.name, str(link.readlink())
        except OSError:
            continue  # closed meanwhile
