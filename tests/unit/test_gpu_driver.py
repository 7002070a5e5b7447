"""The driver's maps: every GPU that a process sees goes to a different one."""

import ctypes
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmig.capture.device import driver
from torchmig.capture.device.driver import DriverError, ProcessState, gpu_map
from torchmig.errors import UsageError

A, B, C, D = (UUID(int=number) for number in range(1, 5))


def test_a_swap_names_both():
    assert gpu_map([A, B], {A: B}, [A, B]) == {A: B, B: A}


def test_where_nothing_moves_the_map_says_so():
    assert gpu_map([A, B], {A: A}, [A, B]) == {A: A, B: B}
    assert gpu_map([A], {A: A}, [A, B]) == {}


def test_what_a_process_sees_and_does_not_use_goes_along():
    assert gpu_map([A, B, C], {A: B, B: A}, [A, B, C]) == {A: B, B: A, C: C}
    assert gpu_map([A, B], {A: C}, [C, D]) == {A: C, B: D}


def test_two_gpus_of_one_process_do_not_become_one():
    with pytest.raises(UsageError, match="would become one"):
        gpu_map([A, B], {A: C, B: C}, [C, D])


@given(data=st.data(), count=st.integers(1, 8))
def test_a_map_is_a_permutation(data, count):
    present = [UUID(int=number + 1) for number in range(count)]
    used = data.draw(st.lists(st.sampled_from(present), unique=True, min_size=1))
    targets = data.draw(st.permutations(present))[: len(used)]
    found = gpu_map(present, dict(zip(used, targets, strict=True)), present)
    if count == 1:
        assert found == {}
    else:
        assert list(found) == present
        assert sorted(found.values()) == present
        assert all(found[old] == new for old, new in zip(used, targets, strict=True))


class Driver:
    """The driver's states without a driver; some steps are refused for some processes."""

    def __init__(self, monkeypatch, refused=()):
        self.states = {}
        self.steps = []
        self.refused = set(refused)
        monkeypatch.setattr(driver, "state", lambda pid: self.states.get(pid, ProcessState.RUNNING))
        for step, before, after in (
            ("lock", ProcessState.RUNNING, ProcessState.LOCKED),
            ("checkpoint", ProcessState.LOCKED, ProcessState.CHECKPOINTED),
            ("restore", ProcessState.CHECKPOINTED, ProcessState.LOCKED),
            ("unlock", ProcessState.LOCKED, ProcessState.RUNNING),
        ):
            monkeypatch.setattr(driver, step, self.make(step, before, after))

    def make(self, step, before, after):
        def take(pid, *_rest):
            assert driver.state(pid) is before
            if (step, pid) in self.refused:
                raise DriverError(step, pid, "refused")
            self.states[pid] = after
            self.steps.append((step, pid))

        return take


def test_all_are_locked_before_the_first_is_checkpointed(monkeypatch):
    fake = Driver(monkeypatch)
    driver.suspend_all([1, 2, 3])
    assert {step for step, _ in fake.steps[:3]} == {"lock"}
    assert {step for step, _ in fake.steps[3:]} == {"checkpoint"}
    driver.resume_all([1, 2, 3])
    assert {step for step, _ in fake.steps[6:9]} == {"restore"}
    assert {step for step, _ in fake.steps[9:]} == {"unlock"}


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_after_a_refusal_all_run_as_before(monkeypatch, step):
    fake = Driver(monkeypatch, refused=[(step, 2)])
    with pytest.raises(DriverError, match=f"cannot {step} process 2"):
        driver.suspend_all([1, 2, 3])
    assert {driver.state(pid) for pid in (1, 2, 3)} == {ProcessState.RUNNING}
    assert fake.steps


def test_a_restore_that_fails_leaves_no_other_process_behind(monkeypatch):
    fake = Driver(monkeypatch)
    driver.suspend_all([1, 2])
    fake.refused = {("restore", 1)}
    with pytest.raises(DriverError):
        driver.resume_all([1, 2])
    assert driver.state(1) is ProcessState.CHECKPOINTED
    assert driver.state(2) is ProcessState.RUNNING


class Library:
    """libcuda as far as a restore needs it; it takes no map in which nothing moves."""

    def __init__(self):
        self.maps = []

    def cuCheckpointProcessRestore(self, _pid, argument):  # noqa: N802  (the driver's name)
        if argument is None:
            self.maps.append(None)
            return 0
        given = argument._obj
        pairs = [(bytes(given.pairs[n].old), bytes(given.pairs[n].new)) for n in range(given.count)]
        self.maps.append(pairs)
        return 1 if all(old == new for old, new in pairs) else 0

    def cuGetErrorName(self, _code, _text):  # noqa: N802
        return 0


def test_the_map_reaches_the_driver(monkeypatch):
    library = Library()
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver.restore(7, {A: B, B: A})
    driver.restore(7)
    assert library.maps == [[(A.bytes, B.bytes), (B.bytes, A.bytes)], None]


def test_a_driver_that_takes_no_map_without_a_move_is_asked_again(monkeypatch):
    library = Library()
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver.restore(7, {A: A, B: B})
    assert library.maps == [[(A.bytes, A.bytes), (B.bytes, B.bytes)], None]


def test_a_refused_move_is_no_restore_in_place(monkeypatch):
    library = Library()
    library.cuCheckpointProcessRestore = lambda _pid, _argument: 1
    monkeypatch.setattr(driver, "_library", lambda: library)
    with pytest.raises(DriverError, match="cannot restore process 7"):
        driver.restore(7, {A: B, B: A})


def test_layouts_are_those_of_the_drivers_header():
    assert ctypes.sizeof(driver._LockArgs) == 64
    assert ctypes.sizeof(driver._GpuPair) == 32
    assert ctypes.sizeof(driver._RestoreArgs) == 64
    assert driver._RestoreArgs.reserved1.offset == 56
