"""Passing failures are tried again until the deadline, lasting ones never."""

import pytest

from torchmig.errors import ObjectMissingError, StoreError, TransientStoreError
from torchmig.store import RetryingStore, RetryPolicy
from torchmig.store.base import Store


class Flaky(Store):
    """Fails with the given errors, one a call, then works."""

    url = "flaky"
    read_bytes = 1

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def _act(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def exists(self):
        self._act()
        return True

    def create(self):
        self._act()

    def put(self, name, parts, *, durable=True):
        self._act()

    def get(self, name, offset_bytes=0, size_bytes=None):
        self._act()
        return b"data"

    def list(self, prefix):
        yield 1
        self._act()
        yield 2

    def delete(self, name):
        self._act()

    def sweep(self, older_than_seconds):
        self._act()
        return 0


class Clock:
    def __init__(self):
        self.now = 0.0
        self.waits = []

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def make(*errors, **policy):
    clock = Clock()
    flaky = Flaky(*errors)
    return RetryingStore(flaky, RetryPolicy(**policy), wait=clock.wait, clock=clock), flaky, clock


def passing(count):
    return [TransientStoreError("busy") for _ in range(count)]


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.exists(),
        lambda s: s.create(),
        lambda s: s.put("a", [b"x"]),
        lambda s: s.get("a"),
        lambda s: list(s.list("")) == [1, 2] or pytest.fail("listed twice"),
        lambda s: s.delete("a"),
        lambda s: s.sweep(1),
    ],
)
def test_every_call_is_tried_again(call):
    store, flaky, clock = make(*passing(5))
    call(store)
    assert flaky.calls == 6
    assert len(clock.waits) == 5


def test_waits_grow_and_are_bounded():
    store, _, clock = make(*passing(12), deadline_seconds=1000, longest_wait_seconds=8)
    store.get("a")
    assert clock.waits[0] <= 0.2
    assert all(4 <= wait <= 8 for wait in clock.waits[-4:])


def test_gives_up_at_the_deadline():
    store, _, clock = make(*passing(1000), deadline_seconds=60)
    with pytest.raises(StoreError, match=r"busy; gave up after \d+ tries in \d+ s") as caught:
        store.get("a")
    assert not isinstance(caught.value, TransientStoreError)
    assert 30 < clock.now <= 60


@pytest.mark.parametrize("error", [StoreError("denied"), ObjectMissingError("not there")])
def test_lasting_errors_come_through_at_once(error):
    store, flaky, clock = make(error)
    with pytest.raises(type(error)):
        store.get("a")
    assert flaky.calls == 1
    assert clock.waits == []


def test_close_ends_the_waiting():
    store, flaky, _ = make(*passing(1000))
    store.close()
    with pytest.raises(StoreError, match="gave up"):
        store.get("a")
    assert flaky.calls == 1
