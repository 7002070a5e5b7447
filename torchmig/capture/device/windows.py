"""How GPU blocks are laid into staging: one window of it after the other.

Pure arithmetic. A block is cut at multiples of the piece size from its own start, so that equal
blocks give equal pieces wherever they lie.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

PIECE_BYTES = 4 << 20
ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Device memory that has to be kept."""

    device: int  # as the rank numbers them
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a block and its place in staging."""

    block: int  # index of the block
    block_offset: int
    size_bytes: int
    offset: int  # in the window


def windows(blocks: Iterable[Block], window_bytes: int) -> Iterator[list[Piece]]:
    """Yield what goes into staging together, window by window, blocks in their order.

    A block that fits as a whole is never cut between windows unless it is larger than a window.

    Args:
        blocks: What to lay out.
        window_bytes: Size of a window, at least one piece.
    """
    if window_bytes < PIECE_BYTES:
        raise ValueError(f"a window of {window_bytes} bytes cannot hold a piece")
    window: list[Piece] = []
    offset = 0
    for index, block in enumerate(blocks):
        if window and block.size_bytes <= window_bytes < offset + block.size_bytes:
            yield window
            window, offset = [], 0
        done = 0
        while done < block.size_bytes:
            room = window_bytes - offset
            left = block.size_bytes - done
            size = left if left <= room else room - room % PIECE_BYTES
            if size <= 0:
                yield window
                window, offset = [], 0
                continue
            window.append(Piece(index, done, size, offset))
            done += size
            offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if window:
        yield window


_FEWEST_SLOTS = 16  # as many are brought side by side
_LONGEST_WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class Ring:
    """Windows of blocks, and the places in staging that they take one after the other."""

    windows: Sequence[Sequence[Piece]]
    window_bytes: int
    slots: int

    @classmethod
    def lay_out(cls, blocks: Iterable[Block], size_bytes: int) -> "Ring":
        """Divide staging for blocks.

        Args:
            blocks: What goes through it.
            size_bytes: How much of staging may be used; where that is tiny a little more is.
        """
        window = min(_LONGEST_WINDOW_BYTES, max(2 * PIECE_BYTES, size_bytes // _FEWEST_SLOTS))
        window -= window % PIECE_BYTES
        return cls(list(windows(blocks, window)), window, max(1, size_bytes // window))

    @property
    def size_bytes(self) -> int:
        """How much of staging is used."""
        return self.window_bytes * min(self.slots, len(self.windows))

    def pieces(self, number: int) -> list[Piece]:
        """Return a window's pieces at their places in staging."""
        start = number % self.slots * self.window_bytes
        return [replace(piece, offset=start + piece.offset) for piece in self.windows[number]]
