"""Sizes, durations and signals as people write them, in one place for flags, files and reports."""

import re
import signal

_SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _SIZE_UNITS[f"{_letter}IB"] = 1024**_power
    _SIZE_UNITS[f"{_letter}B"] = 1000**_power
    _SIZE_UNITS[_letter] = 1024**_power  # as torch, dd and Slurm read a bare letter

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_BINARY_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(text: str) -> int:
    """Return bytes for '4096', '512MiB', '64G' (binary) or '10GB' (decimal)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError(f"'{text}' is not a size; write it as 512MiB or 64G")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def parse_duration(text: str) -> float:
    """Return seconds for '90', '90s', '30m', '1h30m' or '250ms'; never zero."""
    compact = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        seconds = float(compact)
    else:
        parts = _DURATION_PART.findall(compact)
        if not parts or "".join(number + unit for number, unit in parts) != compact:
            raise ValueError(f"'{text}' is not a duration; write it as 90s, 30m or 1h30m")
        seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise ValueError(f"'{text}' is not a duration above zero")
    return seconds


def parse_signal(text: str) -> signal.Signals:
    """Return the signal for 'USR1', 'SIGUSR1' or '10'."""
    name = text.strip().upper()
    try:
        if name.isdigit():
            return signal.Signals(int(name))
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except (KeyError, ValueError):
        raise ValueError(f"'{text}' is not a signal; write it as USR1") from None


def parse_bool(text: str) -> bool:
    """Return the truth of '1', 'true', 'yes', 'on' and their opposites."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"'{text}' is neither yes nor no; write 1 or 0")


def format_size(size_bytes: float) -> str:
    """Return a size for people, such as '1.582 GiB'."""
    power = 0
    while size_bytes >= 1024 and power < len(_BINARY_NAMES) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.0f} B" if power == 0 else f"{size_bytes:.3f} {_BINARY_NAMES[power]}"


def format_duration(seconds: float) -> str:
    """Return a duration for people, such as '0.84 s', '4 min 10 s' or '2 h 5 min'."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 13, 0) for '2.13.0+cpu'."""
    numbers = []
    for part in version.replace("-", ".").replace("+", ".").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
