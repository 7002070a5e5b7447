"""Reading many small objects side by side: on S3 each one alone costs a round trip."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torchmig.errors import ObjectMissingError
from torchmig.store import Store

_THREADS = 16
_WINDOW = 32  # so many results wait in memory at most


def fetch_all(store: Store, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of objects in the order of names; those that have gone are left out."""

    def fetch(name: str) -> bytes | None:
        try:
            return store.get(name)
        except ObjectMissingError:
            return None

    if len(names) <= 2:
        for name in names:
            data = fetch(name)
            if data is not None:
                yield name, data
        return
    with ThreadPoolExecutor(min(_THREADS, len(names)), "torchmig-fetch") as pool:
        for start in range(0, len(names), _WINDOW):
            window = names[start : start + _WINDOW]
            for name, data in zip(window, pool.map(fetch, window), strict=True):
                if data is not None:
                    yield name, data
