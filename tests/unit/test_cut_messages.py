"""Plain forms: what is packed comes back, through msgpack as well."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmig.cut import (
    Block,
    Channel,
    Collective,
    Direction,
    Level,
    Order,
    Place,
    Report,
    State,
    holds,
    pack_orders,
    pack_reports,
    parks,
    parse_key,
    split_orders,
    unpack_orders,
    unpack_reports,
)
from torchmig.cut.rounds import pack_ranks, unpack_ranks

ranks = st.integers(0, 1 << 20)
groups = st.text(max_size=12)
keys = st.one_of(
    st.builds(Collective, groups),
    st.builds(Block, groups, ranks),
    st.builds(
        Channel, groups, st.integers(-1, 1000), ranks, ranks, st.sampled_from(list(Direction))
    ),
)
counters = st.dictionaries(keys, st.integers(1, 1 << 40), max_size=4)
orders = st.builds(Order, ranks, ranks, st.sampled_from(list(Level)), counters, final=st.booleans())
reports = st.builds(
    Report,
    rank=ranks,
    request=ranks,
    serial=ranks,
    sequence=ranks,
    state=st.sampled_from(list(State)),
    place=st.sampled_from(list(Place)),
    waiting=st.lists(keys, max_size=2).map(tuple),
    counters=counters,
    groups=st.just({"world": (0, 1, 2, 3), "odd": (1, 3)}),
    steps=ranks,
    seconds_per_step=st.floats(0, 100),
    stack=st.text(max_size=20),
)


def through_msgpack(wire):
    return msgpack.unpackb(msgpack.packb(wire))


@given(keys)
def test_key_comes_back_from_its_text(key):
    assert parse_key(str(key)) == key


@pytest.mark.parametrize("text", ["", "gather/x", "send/1/2/x", "block/x/g", "recv/a/1/0/g"])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="text form of a key"):
        parse_key(text)


@given(orders)
def test_order_comes_back(order):
    assert Order.from_wire(through_msgpack(order.to_wire())) == order


@given(reports)
def test_report_comes_back(report):
    assert Report.from_wire(through_msgpack(report.to_wire())) == report


@given(st.lists(reports, max_size=4))
def test_reports_of_a_node_come_back(node):
    assert unpack_reports(through_msgpack(pack_reports(node))) == node


def test_groups_are_named_once_a_connection():
    report = Report(0, 1, 1, 1, State.RUNNING, groups={"world": (0, 1)})
    known = set()
    assert pack_reports([report, report], known)["groups"] == {"world": [0, 1, 2]}
    assert pack_reports([report], known)["groups"] == {}


@given(st.dictionaries(ranks, orders, max_size=4))
def test_orders_of_a_node_come_back(node):
    assert dict(unpack_orders(through_msgpack(pack_orders(node.items())))) == node


def test_equal_orders_share_an_entry_and_go_to_their_nodes():
    order = Order(1, 2, Level.GATE, {Collective("world"): 3})
    nodes = split_orders([(rank, order) for rank in range(8)], lambda rank: rank // 4)
    assert nodes.keys() == {0, 1}
    assert len(pack_orders(nodes[0])["orders"]) == 1


@given(st.lists(st.integers(0, 200), max_size=30))
def test_members_come_back(members):
    assert unpack_ranks(pack_ranks(members)) == tuple(members)


def test_rows_and_columns_of_a_grid_are_one_run():
    assert pack_ranks(range(16384)) == [0, 1, 16384]
    assert pack_ranks(range(5, 16384, 128)) == [5, 128, 128]


def test_gate_holds_what_is_past_its_target():
    key = Collective("world")
    order = Order(1, 1, Level.GATE, {key: 3})
    assert not holds(order, {key: 2}, key)
    assert holds(order, {key: 3}, key)
    assert holds(order, {}, Collective("other"))
    assert not holds(Order(1, 1, Level.STEP), {}, key)


def test_boundary_and_python_park_once_everything_is_met():
    key = Collective("world")
    order = Order(1, 1, Level.GATE, {key: 3})
    assert parks(order, {key: 3}, Place.BOUNDARY)
    assert not parks(order, {key: 2}, Place.BOUNDARY)
    assert not parks(order, {key: 3}, Place.PYTHON)
    assert parks(Order(1, 1, Level.ANY), {}, Place.PYTHON)
    assert not parks(Order(1, 1, Level.FREE), {}, Place.BOUNDARY)
