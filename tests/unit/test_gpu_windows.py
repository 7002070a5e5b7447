"""GPU blocks laid into staging: complete, in order, in bounds, cut from each block's own start."""

from hypothesis import given
from hypothesis import strategies as st

from torchmig.capture.device.windows import ALIGNMENT_BYTES, PIECE_BYTES, Block, Ring, windows

SIZES = st.one_of(
    st.integers(1, 3 * ALIGNMENT_BYTES),
    st.integers(PIECE_BYTES - 2, PIECE_BYTES + 2),
    st.integers(1, 5 * PIECE_BYTES),
)


@given(
    sizes=st.lists(SIZES, max_size=30),
    window_bytes=st.integers(PIECE_BYTES, 4 * PIECE_BYTES),
)
def test_every_byte_is_in_one_place(sizes, window_bytes):
    blocks = [Block(0, number << 30, size) for number, size in enumerate(sizes)]
    done = dict.fromkeys(range(len(blocks)), 0)
    order = []
    for window in windows(blocks, window_bytes):
        assert window
        end = 0
        for piece in window:
            assert piece.size_bytes > 0
            assert piece.offset >= end
            assert piece.offset % ALIGNMENT_BYTES == 0
            end = piece.offset + piece.size_bytes
            assert piece.block_offset == done[piece.block]
            assert piece.block_offset % PIECE_BYTES == 0
            done[piece.block] += piece.size_bytes
            order.append(piece.block)
        assert end <= window_bytes
    assert order == sorted(order)
    assert done == {number: block.size_bytes for number, block in enumerate(blocks)}


@given(sizes=st.lists(st.integers(1, PIECE_BYTES), min_size=1, max_size=30))
def test_small_blocks_stay_in_one_window(sizes):
    blocks = [Block(0, number << 30, size) for number, size in enumerate(sizes)]
    for window in windows(blocks, 2 * PIECE_BYTES):
        assert all(piece.size_bytes == blocks[piece.block].size_bytes for piece in window)


def test_all_in_one_window_where_it_fits():
    blocks = [Block(0, 0, 7), Block(1, 1 << 20, PIECE_BYTES)]
    (window,) = windows(blocks, 2 * PIECE_BYTES)
    assert [piece.offset for piece in window] == [0, ALIGNMENT_BYTES]


def test_nothing_makes_no_window():
    assert list(windows([], PIECE_BYTES)) == []


@given(
    sizes=st.lists(SIZES, max_size=30),
    size_bytes=st.one_of(st.integers(1, 20 * PIECE_BYTES), st.integers(1, 1 << 40)),
)
def test_windows_that_are_there_together_do_not_touch(sizes, size_bytes):
    blocks = [Block(0, number << 30, size) for number, size in enumerate(sizes)]
    ring = Ring.lay_out(blocks, size_bytes)
    assert ring.size_bytes <= max(size_bytes, 2 * PIECE_BYTES)
    taken = []
    for number in range(len(ring.windows)):
        pieces = ring.pieces(number)
        begin, end = pieces[0].offset, pieces[-1].offset + pieces[-1].size_bytes
        assert end <= ring.size_bytes
        del taken[: max(0, len(taken) - ring.slots + 1)]
        assert all(end <= other[0] or begin >= other[1] for other in taken)
        taken.append((begin, end))
    moved = [piece for number in range(len(ring.windows)) for piece in ring.pieces(number)]
    plain = [piece for window in windows(blocks, ring.window_bytes) for piece in window]
    assert [(p.block, p.block_offset, p.size_bytes) for p in moved] == [
        (p.block, p.block_offset, p.size_bytes) for p in plain
    ]
