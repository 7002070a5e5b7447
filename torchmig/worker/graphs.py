"""Notices collectives inside CUDA graphs: they name a communicator, and that does not survive."""

from typing import Any

import torch

from torchmig import _C
from torchmig.worker.wrapping import wrap

_captured = [False]


def install() -> None:
    """Watch every capture of this process."""
    graph = torch.cuda.CUDAGraph
    for name, around in (("capture_begin", _begin), ("capture_end", _end)):
        if hasattr(graph, name):
            wrap(graph, name, around)


def hold_collectives() -> bool:
    """Return whether a collective on a GPU has been captured in this process."""
    return _captured[0]


def _begin(original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(graph, *args, **kwargs)
    graph._torchmig_issued = _issued()
    return result


def _end(original: Any, graph: Any) -> Any:
    if getattr(graph, "_torchmig_issued", None) not in (None, _issued()):
        _captured[0] = True
    return original(graph)


def _issued() -> dict[str, int]:
    # Between begin and end a thread may also issue what is not captured; then a graph without
    # collectives is refused, which is on the safe side.
    return dict(_C.counters())
