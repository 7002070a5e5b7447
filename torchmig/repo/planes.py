"""Byte planes: all first bytes of the numbers, then all second ones, and so on.

In floating-point numbers the bytes with sign and exponent repeat much and the others hardly at all.
Side by side, a compressor finds little; apart, it finds all there is.
"""

import importlib.util

from torchmig.store import Buffer

# Four times as fast and side by side in several threads, but torch can do without numpy too.
_HAS_NUMPY = importlib.util.find_spec("numpy") is not None


def split(data: Buffer, width: int) -> bytes:
    """Return the planes of numbers of `width` bytes; the length must be a multiple of it."""
    if _HAS_NUMPY:
        import numpy as np

        rows = np.frombuffer(data, np.uint8).reshape(-1, width)
        return rows.T.tobytes()
    plain = bytes(data)
    return b"".join([plain[number::width] for number in range(width)])


def merge(planes: Buffer, width: int, numbers: Buffer) -> None:
    """Write the numbers whose planes these are into memory of the same length."""
    count = len(planes) // width
    if _HAS_NUMPY:
        import numpy as np

        rows = np.frombuffer(numbers, np.uint8).reshape(count, width)
        for number, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(width, count)):
            rows[:, number] = plane
        return
    strided = memoryview(numbers)
    for number in range(width):
        strided[number::width] = planes[number * count : (number + 1) * count]
