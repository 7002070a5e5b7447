"""Whether a snapshot's ranks fit this host's GPUs is known before anything is started."""

import pytest

from torchmig.agent import gpu_places, gpu_state
from torchmig.capture.device import gpus
from torchmig.capture.device.gpus import Gpu
from torchmig.errors import HostUnfitError, SnapshotUnfitError, UsageError
from torchmig.repo import RankSection

GIB = 1 << 30


def uuid(number):
    return f"00000000-0000-0000-0000-{number:012d}"


def gpu(index, number, name="H", free=100 * GIB):
    return Gpu(index, f"GPU-{uuid(number)}", name, 140 * GIB, free, (9, 0), ())


def section(rank, *numbers, visible=(1, 2), reserved=10 * GIB, name="H"):
    devices = [
        {"device": d, "uuid": uuid(n), "name": name, "reserved_bytes": reserved, "live_bytes": 1}
        for d, n in enumerate(numbers)
    ]
    facts = {"devices": devices, "visible": [uuid(n) for n in visible], "arena": ""}
    return RankSection(rank, "host", 1, [], {gpu_state.STATE: {"facts": facts, "blocks": []}})


@pytest.fixture
def host(monkeypatch):
    present = [gpu(0, 1), gpu(1, 2)]
    monkeypatch.setattr(gpus, "list_gpus", lambda: present)
    monkeypatch.setattr(gpus, "driver_version", lambda: "580.1")
    return present


def plan(sections, named=None):
    maps = gpu_places.plan_restore(sections, named, "snapshot ab12cd34")
    return {rank: {old.int: new.int for old, new in found.items()} for rank, found in maps.items()}


def as_int(number):
    return gpus.parse_uuid(uuid(number)).int


SAME = {as_int(1): as_int(1), as_int(2): as_int(2)}


@pytest.mark.usefixtures("host")
def test_the_same_gpus_are_named_where_there_are_several():
    assert plan([section(0, 1), section(1, 2)]) == {0: SAME, 1: SAME}
    assert plan([section(0, 1, visible=(1,))]) == {0: {}}


@pytest.mark.usefixtures("host")
def test_named_gpus_are_taken_in_the_order_of_the_ranks():
    swap = {as_int(1): as_int(2), as_int(2): as_int(1)}
    assert plan([section(0, 1), section(1, 2)], "1,0") == {0: swap, 1: swap}
    assert plan([section(0, 1)], f"GPU-{uuid(2)}") == {0: swap}


@pytest.mark.usefixtures("host")
def test_a_rank_that_used_no_gpu_is_left_alone():
    cpu = RankSection(1, "host", 1, [], {})
    assert plan([cpu]) == {}
    assert plan([section(0, 1), cpu]) == {0: SAME}


def test_on_another_host_the_first_gpus_are_taken(host):
    host[:] = [gpu(0, 7), gpu(1, 8)]
    moved = {as_int(1): as_int(7), as_int(2): as_int(8)}
    assert plan([section(0, 1), section(1, 2)]) == {0: moved, 1: moved}


@pytest.mark.usefixtures("host")
def test_a_gpu_that_is_not_here_is_a_wrong_command_line():
    with pytest.raises(UsageError, match="no GPU '5' on this host; there are: 0, 1"):
        plan([section(0, 1)], "5")


@pytest.mark.usefixtures("host")
def test_too_few_gpus_are_refused():
    with pytest.raises(SnapshotUnfitError, match="needs 2 GPUs and 1 are named"):
        plan([section(0, 1), section(1, 2)], "0")


def test_another_chip_is_refused(host):
    host[:] = [gpu(0, 7, name="L"), gpu(1, 8, name="L")]
    with pytest.raises(SnapshotUnfitError, match="rank 0 was on 'H' and GPU 0 is 'L'"):
        plan([section(0, 1), section(1, 2)])


def test_two_ranks_on_one_gpu_need_the_memory_of_both(host):
    sections = [section(0, 1, reserved=60 * GIB), section(1, 1, reserved=60 * GIB)]
    with pytest.raises(SnapshotUnfitError, match=r"GPU 0 has 100\.000 GiB free and 122\.000 GiB"):
        plan(sections)
    host[0] = gpu(0, 1, free=130 * GIB)
    assert plan(sections) == {0: SAME, 1: SAME}


def test_a_host_without_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(gpus, "list_gpus", list)
    with pytest.raises(SnapshotUnfitError, match="its ranks use GPUs and this host has none"):
        plan([section(0, 1)])


def test_an_old_driver_is_refused(host, monkeypatch):
    assert host
    monkeypatch.setattr(gpus, "driver_version", lambda: "570.86")
    with pytest.raises(HostUnfitError, match=r"driver '570\.86' is older than 580"):
        plan([section(0, 1)])


def test_without_a_driver_there_are_no_gpus():
    if gpus.driver_version():
        pytest.skip("this host has an NVIDIA driver")
    assert gpus.list_gpus() == []
    with pytest.raises(HostUnfitError, match="no NVIDIA driver"):
        gpus.require_driver()
