import threading

import pytest

from torchmig.together import attempts, together


def test_results_come_in_order_and_all_run_at_once():
    meeting = threading.Barrier(3, timeout=30)

    def work(number):
        meeting.wait()  # nobody passes unless all three are under way
        return number * number

    assert together(work, iter([3, 1, 2])) == [9, 1, 4]


def test_nothing_to_do():
    assert together(str, []) == []


def test_the_first_error_in_order_is_raised_when_all_have_ended():
    failed = threading.Event()
    ended = []

    def work(number):
        if number == 2:
            failed.set()
            raise ValueError(number)
        assert failed.wait(30)
        if number == 1:
            raise KeyError(number)
        ended.append(number)

    with pytest.raises(KeyError):
        together(work, [0, 1, 2, 3])
    assert sorted(ended) == [0, 3]


def test_attempts_tell_of_every_one():
    futures = attempts(lambda number: 1 // number, [1, 0, 1])
    assert [type(future.exception()) for future in futures] == [
        type(None),
        ZeroDivisionError,
        type(None),
    ]
