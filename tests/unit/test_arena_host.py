"""The arena over host memory: addresses stay, bytes can leave and come back."""

import ctypes
import threading

import pytest
import torch  # noqa: F401  (the extension's libraries are torch's)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

torchmig_c = pytest.importorskip("torchmig._C", reason="torchmig's C++ extension is not built")

BASE = 0x300000000000
RANGE = 1 << 20  # a device's range
GRAIN = 1 << 16
DEVICES = 2


def make_arena(capacity=1 << 30):
    return torchmig_c.HostArena(
        base=BASE,
        size_per_device=RANGE,
        granularity=GRAIN,
        max_devices=DEVICES,
        capacity=capacity,
    )


def write(address, data):
    ctypes.memmove(address, data, len(data))


def read(address, size):
    return ctypes.string_at(address, size)


def round_up(size):
    return -(-size // GRAIN) * GRAIN


def test_addresses_are_the_same_in_every_arena():
    first, second = make_arena(), None
    addresses = [first.allocate(device, 100) for device in (0, 1, 0)]
    del first
    second = make_arena()
    assert [second.allocate(device, 100) for device in (0, 1, 0)] == addresses
    assert addresses == [BASE, BASE + RANGE, BASE + GRAIN]


def test_out_of_memory_is_an_answer_and_changes_nothing():
    arena = make_arena(capacity=2 * GRAIN)
    kept = arena.allocate(0, GRAIN)
    write(kept, b"kept")
    with pytest.raises(MemoryError):
        arena.allocate(0, 2 * GRAIN)
    assert arena.physical_bytes == arena.backing_bytes == GRAIN
    assert read(kept, 4) == b"kept"
    # The address that the failed request would have had is free again.
    assert arena.allocate(0, GRAIN) == kept + GRAIN


def test_a_full_range_is_out_of_memory():
    arena = make_arena()
    with pytest.raises(MemoryError):
        arena.allocate(0, RANGE + 1)
    arena.allocate(0, RANGE)
    with pytest.raises(MemoryError):
        arena.allocate(0, 1)
    assert arena.allocate(1, RANGE) == BASE + RANGE


def test_a_device_beyond_the_last_is_refused():
    with pytest.raises(RuntimeError, match="allocate failed"):
        make_arena().allocate(DEVICES, 1)


def test_a_range_in_use_makes_the_arena_unusable_with_the_reason():
    first = make_arena()
    first.allocate(0, 1)
    second = make_arena()
    with pytest.raises(RuntimeError):
        second.allocate(0, 1)
    assert "device 0 cannot be reserved" in second.why_unusable
    assert first.why_unusable == ""


def test_a_long_job_does_not_run_out_of_addresses():
    arena = make_arena()
    held = []
    for step in range(2000):
        held.append(arena.allocate(0, GRAIN * (1 + step % 3)))
        if len(held) > 3:
            arena.free(held.pop((step * 7) % len(held)))
    assert all(BASE <= address < BASE + RANGE for address in held)


def test_freeing_twice_or_elsewhere_is_refused():
    arena = make_arena()
    address = arena.allocate(0, 2 * GRAIN)
    with pytest.raises(RuntimeError):
        arena.free(address + GRAIN)
    arena.free(address)
    with pytest.raises(RuntimeError):
        arena.free(address)


def test_detaching_gives_all_memory_back_and_keeps_the_addresses():
    arena = make_arena()
    address = arena.allocate(0, 3 * GRAIN)
    write(address, b"x" * 3 * GRAIN)
    arena.detach()
    arena.detach()
    assert arena.backing_bytes == arena.physical_bytes == 0
    assert arena.mappings() == [(0, address, 3 * GRAIN)]
    arena.attach()
    assert arena.backing_bytes == 3 * GRAIN
    write(address, b"again")
    assert read(address, 5) == b"again"
    arena.free(address)
    assert arena.backing_bytes == 0


def test_attaching_without_enough_memory_can_be_tried_again():
    arena = make_arena(capacity=4 * GRAIN)
    addresses = [arena.allocate(0, GRAIN) for _ in range(4)]
    arena.detach()
    arena.set_capacity(3 * GRAIN)
    with pytest.raises(MemoryError):
        arena.attach()
    assert arena.detached
    assert arena.backing_bytes == 0
    arena.set_capacity(4 * GRAIN)
    arena.attach()
    for address in addresses:
        write(address, b"there")
        assert read(address, 5) == b"there"


@pytest.mark.timeout(20)
def test_allocations_wait_while_detached():
    arena = make_arena()
    address = arena.allocate(0, GRAIN)
    arena.detach()
    got = []
    waiting = threading.Thread(target=lambda: got.append(arena.allocate(0, GRAIN)))
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    assert got == []
    arena.attach()
    waiting.join()
    assert got == [address + GRAIN]


def test_a_handle_outlives_its_release_while_it_is_mapped():
    arena = make_arena()
    space = arena.reserve(0, 4 * GRAIN)
    handle = arena.create(0, GRAIN)
    arena.map(space, GRAIN, 0, handle)
    arena.release(handle)
    arena.set_access(space, GRAIN, 0)
    write(space, b"still here")
    assert read(space, 10) == b"still here"
    arena.unmap(space, GRAIN)
    assert arena.backing_bytes == 0
    with pytest.raises(RuntimeError):
        arena.release(handle)


def test_handles_stay_valid_over_a_detach():
    arena = make_arena()
    space = arena.reserve(0, 4 * GRAIN)
    handles = [arena.create(0, GRAIN) for _ in range(2)]
    for number, handle in enumerate(handles):
        arena.map(space + number * GRAIN, GRAIN, 0, handle)
    arena.set_access(space, 2 * GRAIN, 0)
    arena.detach()
    arena.attach()
    write(space, b"a" * 2 * GRAIN)
    arena.unmap(space, 2 * GRAIN)
    for handle in handles:
        arena.release(handle)
    assert arena.backing_bytes == 0
    arena.unreserve(space)
    assert arena.allocate(0, GRAIN) == space


def test_unmapping_a_part_of_a_mapping_is_refused():
    arena = make_arena()
    space = arena.reserve(0, 2 * GRAIN)
    handle = arena.create(0, 2 * GRAIN)
    arena.map(space, 2 * GRAIN, 0, handle)
    with pytest.raises(RuntimeError):
        arena.unmap(space, GRAIN)
    with pytest.raises(RuntimeError):
        arena.unmap(space + GRAIN, GRAIN)
    arena.unmap(space, 2 * GRAIN)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls: what was written is what is read, and nothing is lost or shared."""

    segments = Bundle("segments")
    growing = Bundle("growing")

    @initialize(capacity=st.integers(4, 24))
    def start(self, capacity):
        self.capacity = capacity * GRAIN
        self.arena = make_arena(self.capacity)
        self.contents = {}  # address -> bytes of every mapped piece
        self.stamp = 0

    def fill(self, address, size):
        self.stamp += 1
        data = self.stamp.to_bytes(8, "little") * (size // 8)
        write(address, data)
        self.contents[address] = data

    def used(self):
        return sum(len(data) for data in self.contents.values())

    @rule(target=segments, device=st.integers(0, DEVICES - 1), size=st.integers(1, 4 * GRAIN))
    def allocate(self, device, size):
        whole = round_up(size)
        try:
            address = self.arena.allocate(device, size)
        except MemoryError:
            fits = self.used() + whole <= self.capacity
            # A range may be too full or too scattered; one that is empty never is.
            in_range = any(
                BASE + device * RANGE <= at < BASE + (device + 1) * RANGE for at in self.contents
            )
            assert not fits or in_range or self.reserved.get(device)
            return None
        assert BASE + device * RANGE <= address <= BASE + (device + 1) * RANGE - whole
        assert all(
            address + whole <= at or at + len(data) <= address for at, data in self.contents.items()
        )
        self.fill(address, whole)
        return address

    @rule(address=consumes(segments))
    def free(self, address):
        if address is not None:
            self.arena.free(address)
            del self.contents[address]

    @initialize()
    def no_reservations(self):
        self.reserved = {}

    @rule(target=growing, device=st.integers(0, DEVICES - 1))
    def reserve(self, device):
        try:
            space = self.arena.reserve(device, 4 * GRAIN)
        except MemoryError:
            return None
        self.reserved[device] = self.reserved.get(device, 0) + 1
        return {"device": device, "space": space, "handles": {}}

    @rule(segment=growing, slot=st.integers(0, 3))
    def grow(self, segment, slot):
        if segment is None or slot in segment["handles"]:
            return
        try:
            handle = self.arena.create(segment["device"], GRAIN)
        except MemoryError:
            assert self.used() + GRAIN > self.capacity
            return
        at = segment["space"] + slot * GRAIN
        self.arena.map(at, GRAIN, 0, handle)
        self.arena.set_access(at, GRAIN, segment["device"])
        segment["handles"][slot] = handle
        self.fill(at, GRAIN)

    @rule(segment=growing, slot=st.integers(0, 3))
    def shrink(self, segment, slot):
        if segment is None or slot not in segment["handles"]:
            return
        at = segment["space"] + slot * GRAIN
        self.arena.unmap(at, GRAIN)
        self.arena.release(segment["handles"].pop(slot))
        del self.contents[at]

    @rule(segment=consumes(growing))
    def unreserve(self, segment):
        if segment is None:
            return
        for slot in list(segment["handles"]):
            self.shrink(segment, slot)
        self.arena.unreserve(segment["space"])
        self.reserved[segment["device"]] -= 1

    @rule(short=st.booleans())
    def leave_and_come_back(self, short):
        saved = {at: read(at, len(data)) for at, data in self.contents.items()}
        self.arena.detach()
        assert self.arena.backing_bytes == 0
        if short and saved:
            self.arena.set_capacity(self.used() - 1)
            with pytest.raises(MemoryError):
                self.arena.attach()
            assert self.arena.backing_bytes == 0
            self.arena.set_capacity(self.capacity)
        self.arena.attach()
        for at, data in saved.items():
            write(at, data)

    @invariant()
    def what_was_written_is_read(self):
        if hasattr(self, "arena"):
            for at, data in self.contents.items():
                assert read(at, len(data)) == data
            assert self.arena.backing_bytes == self.arena.physical_bytes == self.used()

    def teardown(self):
        self.arena = None


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
