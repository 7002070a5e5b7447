"""A CUDA graph that holds collectives is noticed when it is captured."""

import pytest
import torch

from torchmig.worker import device, graphs


@pytest.fixture
def graph(monkeypatch):
    class Graph:
        def __init__(self):
            self.calls = []

        def capture_begin(self, pool=None, mode="global"):
            self.calls.append(("begin", pool, mode))

        def capture_end(self):
            self.calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "_captured", [False])
    graphs.install()
    return Graph()


@pytest.fixture
def issued(monkeypatch):
    counters = {"c|0": 5}
    monkeypatch.setattr(graphs, "_issued", lambda: dict(counters))
    return counters


@pytest.mark.usefixtures("issued")
def test_a_graph_of_kernels_alone_is_fine(graph):
    graph.capture_begin("pool", mode="relaxed")
    graph.capture_end()
    assert graph.calls == [("begin", "pool", "relaxed"), "end"]
    assert not graphs.hold_collectives()


def test_a_collective_inside_is_noticed(graph, issued):
    graph.capture_begin()
    issued["c|0"] += 1
    graph.capture_end()
    assert graphs.hold_collectives()


def test_collectives_between_graphs_are_fine(graph, issued):
    for _ in range(2):
        graph.capture_begin()
        graph.capture_end()
        issued["c|0"] += 1
    assert not graphs.hold_collectives()


def test_torchs_own_class_can_be_watched():
    graphs.install()
    assert callable(torch.cuda.CUDAGraph.capture_end)


def test_a_rank_without_gpu_refuses_nothing():
    assert device.refused() == []
    assert device.describe() == {"devices": [], "visible": [], "arena": ""}
    assert device.live_blocks() == []
    assert device.devices() == []
    device.settle()
    assert device.release() == 0
    device.regain()
