"""Process groups that some of their ranks have destroyed already, and others not yet.

Ranks destroy a group each by itself, so a cut may lie between one and the next. All members have to
build a backend anew, which those who have no group any more cannot. The last one that has it does
without: there is nobody left that it could talk to.
"""

from collections import Counter
from collections.abc import Iterable

from torchmig.errors import RequestWithdrawnError

# Name, first member, number of members. Groups of different ranks may have the same name.
Held = tuple[str, int, int]


def without_peers(held: Iterable[Held]) -> list[tuple[str, int]]:
    """Return name and first member of the groups that only one of several ranks still has.

    Args:
        held: The groups of all ranks, each as often as there are ranks that have it.

    Raises:
        RequestWithdrawnError: Some ranks have destroyed a group that two others still have.
    """
    found = []
    for (name, first, size), holders in Counter(held).items():
        if holders >= size:
            continue
        if holders > 1:
            raise RequestWithdrawnError(
                f"process group '{name}' has been destroyed by {size - holders} of its {size} "
                "ranks, and the others may still use it; ask again when they have destroyed it too"
            )
        found.append((name, first))
    return sorted(found)
