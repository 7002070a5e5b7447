import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmig import units


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("512MiB", 512 << 20), ("64G", 64 << 30), ("10GB", 10**10), ("1.5 k", 1536)],
)
def test_sizes(text, size_bytes):
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1 XB", "1e9", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1h30m", 5400), ("250ms", 0.25), ("1.5m", 90), ("2D", 172800)],
)
def test_durations(text, seconds):
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "30 parsecs", "1h 30", "0", "-3s", "m"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["USR1", "sigusr1", "10"])
def test_signals(text):
    assert units.parse_signal(text) is signal.SIGUSR1


@pytest.mark.parametrize("text", ["USR3", "999", ""])
def test_what_is_no_signal(text):
    with pytest.raises(ValueError, match="is not a signal"):
        units.parse_signal(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_printed_sizes_read_back_within_their_digits(size_bytes):
    assert units.parse_size(units.format_size(size_bytes)) == pytest.approx(size_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.84 s"), (59.4, "59.40 s"), (250, "4 min 10 s"), (7500, "2 h 5 min")],
)
def test_durations_for_people(seconds, text):
    assert units.format_duration(seconds) == text
