"""The pool does all tasks, holds producers back, and passes failures on."""

import threading

import pytest

from torchmig.repo.buffers import BufferPool
from torchmig.repo.pool import Pool


def test_all_tasks_are_done():
    done = []
    with Pool("test", 4, 10) as pool:
        for number in range(500):
            pool.submit(lambda number=number: done.append(number), 1)
        pool.wait_idle()
        assert sorted(done) == list(range(500))
    assert not [t for t in threading.enumerate() if t.name.startswith("torchmig-test")]


def test_the_weight_in_hand_is_bounded():
    held, most, lock = 0, 0, threading.Lock()

    def task(weight):
        nonlocal held
        with lock:
            held -= weight

    with Pool("test", 2, 10) as pool:
        for number in range(300):
            weight = number % 7 + 1
            with lock:
                held += weight
            pool.submit(lambda weight=weight: task(weight), weight)
            with lock:
                most = max(most, held)
        pool.wait_idle()
    assert most <= 10 + 7


def test_a_task_heavier_than_all_is_let_through():
    with Pool("test", 1, 10) as pool:
        for _ in range(3):
            pool.submit(lambda: None, 1000)
        pool.wait_idle()


def fail():
    raise ValueError("first")


def test_a_failure_reaches_the_producer():
    with Pool("test", 2, 10) as pool:
        pool.submit(fail)
        with pytest.raises(ValueError, match="first"):
            pool.wait_idle()
        with pytest.raises(ValueError, match="first"):
            pool.submit(lambda: None)
        with pytest.raises(ValueError, match="first"):
            pool.wait_for(lambda: False)


def test_a_failure_wakes_a_producer_that_waits_for_room():
    blocker = threading.Event()

    def slow_fail():
        blocker.wait(30)
        fail()

    with Pool("test", 1, 1) as pool:
        pool.submit(slow_fail, 1)
        threading.Timer(0.05, blocker.set).start()
        with pytest.raises(ValueError, match="first"):
            pool.submit(lambda: None, 1)


def test_leaving_by_an_exception_drops_what_waits():
    done, blocker = [], threading.Event()

    def leave():
        with Pool("test", 1, 1000) as pool:
            pool.submit(lambda: blocker.wait(30))
            for number in range(100):
                pool.submit(lambda number=number: done.append(number))
            threading.Timer(0.05, blocker.set).start()
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        leave()
    assert len(done) <= 1


def test_failing_from_outside():
    with Pool("test", 1, 10) as pool:
        pool.fail(OSError("outside"))
        with pytest.raises(OSError, match="outside"):
            pool.wait_idle()


def test_buffers_are_used_again():
    pool = BufferPool(100)
    first = pool.take()
    assert len(first) == 100
    pool.give(first)
    assert pool.take() is first
    assert pool.take() is not first
    pool.give(bytearray(5))
    assert len(pool.take()) == 100
