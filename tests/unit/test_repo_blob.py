"""Blobs come back as they were or not at all."""

import os
import random
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.errors import IntegrityError
from torchmig.repo import planes
from torchmig.repo.blob import Codec, Decoder, Encoder, Kind, hash_of, zero_hash

SIZES = [1, 100, 4096, 16_385, 65_536, 1 << 20]


@pytest.fixture(params=[False, True], ids=["fresh", "reused"])
def decoder(request):
    return Decoder(reuses_memory=request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", ["noise", "text", "half"])
def test_round_trip(decoder, size, content):
    noise = random.Random(size).randbytes(size)
    text = (b"the same words " * (size // 15 + 1))[:size]
    data = {"noise": noise, "text": text, "half": noise[: size // 2] + text[: size - size // 2]}
    data = data[content]
    encoded = Encoder().encode(memoryview(data), Kind.FILE)
    assert len(encoded.payload) <= size
    if content == "text" and size >= 4096:
        assert encoded.codec == Codec.ZSTD
        assert len(encoded.payload) < size // 2
    if content == "noise":
        assert encoded.codec == Codec.PLAIN
    payload = memoryview(bytes(encoded.payload))
    for _ in range(2):
        assert decoder.decode(hash_of(data), encoded.codec, payload, size) == data


def test_what_one_call_gave_lasts_until_the_next_or_for_ever():
    contents = [b"the same words " * 20_000, b"and other ones " * 20_000]
    payloads = [memoryview(Encoder().encode(memoryview(c), Kind.FILE).payload) for c in contents]
    for reuses_memory, kept in ((False, contents), (True, contents[1:] * 2)):
        decoder = Decoder(reuses_memory=reuses_memory)
        got = [
            decoder.decode(hash_of(data), Codec.ZSTD, payload, len(data))
            for data, payload in zip(contents, payloads, strict=True)
        ]
        assert list(map(bytes, got)) == kept


@pytest.mark.parametrize("left", [1, 1000, -1])
def test_a_frame_that_was_cut_before_it_was_hashed(decoder, left):
    data = random.Random(1).randbytes(1 << 17) * 2
    frame = zstandard.compress(data)[:left]
    payload = memoryview(_short_hash(frame) + frame)
    with pytest.raises(IntegrityError):
        decoder.decode(hash_of(data), Codec.ZSTD, payload, len(data))


@given(st.binary(min_size=1, max_size=3000), st.booleans(), st.integers(0), st.integers(0, 7))
@settings(deadline=None)
def test_every_flipped_bit_is_found(data, repeat, position, bit):
    """Also those that a decompressor does not care about."""
    data = data * 20 if repeat else data
    encoded = Encoder().encode(memoryview(data), Kind.FILE)
    payload = bytearray(encoded.payload)
    payload[position % len(payload)] ^= 1 << bit
    with pytest.raises(IntegrityError):
        Decoder().decode(hash_of(data), encoded.codec, memoryview(payload), len(data))


def test_a_bit_that_zstd_ignores_is_found():
    data = b"words " * 1000
    payload = bytearray(Encoder().encode(memoryview(data), Kind.FILE).payload)
    payload[16 + 4] ^= 1 << 4  # the unused bit of the frame header
    assert zstandard.ZstdDecompressor().decompress(bytes(payload[16:])) == data
    with pytest.raises(IntegrityError):
        Decoder().decode(hash_of(data), Codec.ZSTD, memoryview(payload), len(data))


def test_a_bomb_is_refused_before_it_is_unpacked(decoder):
    data = bytes(64 << 20)
    frame = zstandard.compress(data)
    payload = memoryview(hash_of(frame)[:0] + _short_hash(frame) + frame)
    with pytest.raises(IntegrityError, match="unpacks to"):
        decoder.decode(hash_of(data), Codec.ZSTD, payload, 1000)


def _short_hash(data):
    from blake3 import blake3

    return blake3(data).digest(length=16)


@pytest.mark.parametrize("codec", [4, 15, 255])
def test_unknown_compression(codec):
    with pytest.raises(IntegrityError, match="unknown"):
        Decoder().decode(hash_of(b"x"), codec, memoryview(b"x"), 1)


def test_stretches_that_do_not_compress_are_not_probed_each_time(monkeypatch):
    encoder = Encoder()
    noise = [os.urandom(65_536) for _ in range(80)]
    text = b"word " * 13_107
    codecs = [encoder.encode(memoryview(each), Kind.FILE).codec for each in noise]
    assert set(codecs) == {Codec.PLAIN}
    codecs = [encoder.encode(memoryview(text), Kind.FILE).codec for _ in range(20)]
    assert codecs.count(Codec.ZSTD) >= 12  # it is noticed soon
    assert codecs[-1] == Codec.ZSTD


def test_zero_hash():
    assert zero_hash(1000) == hash_of(bytes(1000))


def floats(count, width, seed=1):
    """Weights as a trained layer has them, in bfloat16 (width 2) or float32."""
    rng = random.Random(seed)
    data = struct.pack(f"<{count}f", *[rng.gauss(0, 0.02) for _ in range(count)])
    if width == 4:
        return data
    return b"".join([data[at + 2 : at + 4] for at in range(0, len(data), 4)])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("has_numpy", [False, True])
def test_planes_of_floats(decoder, monkeypatch, width, has_numpy):
    if has_numpy:
        pytest.importorskip("numpy")
    monkeypatch.setattr(planes, "_HAS_NUMPY", has_numpy)
    data = floats(2_400_000 // width, width)
    assert bytes(planes.split(data, width))[:5] == data[: 5 * width : width]
    merged = bytearray(len(data))
    planes.merge(planes.split(data, width), width, merged)
    assert merged == data
    encoded = Encoder().encode(memoryview(data), Kind.GPU_BLOCK)
    assert encoded.codec == {2: Codec.ZSTD_PLANES_2, 4: Codec.ZSTD_PLANES_4}[width]
    plain = Encoder().encode(memoryview(data), Kind.FILE)
    assert len(encoded.payload) < 0.95 * len(plain.payload)
    payload = memoryview(bytes(encoded.payload))
    for _ in range(2):
        assert bytes(decoder.decode(hash_of(data), encoded.codec, payload, len(data))) == data


def test_text_and_noise_get_no_planes():
    for data in (b"the same words " * 20_000, random.Random(3).randbytes(1 << 18)):
        encoded = Encoder().encode(memoryview(data), Kind.GPU_BLOCK)
        assert encoded.codec in (Codec.PLAIN, Codec.ZSTD)


def test_odd_lengths_of_planes_are_refused():
    data = floats(1_200_000, 2)
    encoded = Encoder().encode(memoryview(data), Kind.GPU_BLOCK)
    with pytest.raises(IntegrityError, match="byte planes"):
        Decoder().decode(hash_of(data), encoded.codec, memoryview(encoded.payload), len(data) - 1)
