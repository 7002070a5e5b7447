"""Makes the key-value store of torch.distributed one whose connection can be made anew."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import Store

from torchmig import _C

Rendezvous = Iterator[tuple[Store, int, int]]

# Stores handed out since the default group was last destroyed.
stores: list[_C.ReconnectableStore] = []


def install() -> None:
    """Wrap the rendezvous handlers that torch has registered."""
    # The attribute torch.distributed.rendezvous is a function; the module is found by its name.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Rendezvous]] = module._rendezvous_handlers
    for scheme, handler in handlers.items():
        handlers[scheme] = _reconnectable(handler)


def wrap(store: Store) -> Store:
    """Return a reconnectable store around `store`, or `store` itself if it is one."""
    if any(store is known for known in stores):
        return store
    wrapped: Store = _C.ReconnectableStore(store)
    stores.append(wrapped)
    return wrapped


def _reconnectable(handler: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    def rendezvous(url: str, **options: Any) -> Rendezvous:
        before = _C.ProcessView.now()
        inner = handler(url, **options)
        store, rank, world_size = next(inner)
        _C.remember_torch(before, _C.ProcessView.now())
        wrapped = wrap(store)
        # A suspended generator would keep the store, and with it the connection.
        del store, before
        if hasattr(inner, "close"):
            inner.close()
        yield wrapped, rank, world_size
        raise RuntimeError(f"unable to rendezvous again over '{url}'")

    return rendezvous
