"""Blobs come back as they were or not at all."""

import os
import random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmig.errors import IntegrityError
from torchmig.repo.blob import Codec, Decoder, Encoder, hash_of, zero_hash

SIZES = [1, 100, 4096, 16_385, 65_536, 1 << 20]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", ["noise", "text", "half"])
def test_round_trip(size, content):
    noise = random.Random(size).randbytes(size)
    text = (b"the same words " * (size // 15 + 1))[:size]
    data = {"noise": noise, "text": text, "half": noise[: size // 2] + text[: size - size // 2]}
    data = data[content]
    encoded = Encoder().encode(memoryview(data))
    assert len(encoded.payload) <= size
    if content == "text" and size >= 4096:
        assert encoded.codec == Codec.ZSTD
        assert len(encoded.payload) < size // 2
    if content == "noise":
        assert encoded.codec == Codec.PLAIN
    payload = memoryview(bytes(encoded.payload))
    assert Decoder().decode(hash_of(data), encoded.codec, payload, size) == data


@given(st.binary(min_size=1, max_size=3000), st.booleans(), st.integers(0), st.integers(0, 7))
@settings(deadline=None)
def test_every_flipped_bit_is_found(data, repeat, position, bit):
    """Also those that a decompressor does not care about."""
    data = data * 20 if repeat else data
    encoded = Encoder().encode(memoryview(data))
    payload = bytearray(encoded.payload)
    payload[position % len(payload)] ^= 1 << bit
    with pytest.raises(IntegrityError):
        Decoder().decode(hash_of(data), encoded.codec, memoryview(payload), len(data))


def test_a_bit_that_zstd_ignores_is_found():
    data = b"words " * 1000
    payload = bytearray(Encoder().encode(memoryview(data)).payload)
    payload[16 + 4] ^= 1 << 4  # the unused bit of the frame header
    assert zstandard.ZstdDecompressor().decompress(bytes(payload[16:])) == data
    with pytest.raises(IntegrityError):
        Decoder().decode(hash_of(data), Codec.ZSTD, memoryview(payload), len(data))


def test_a_bomb_is_refused_before_it_is_unpacked():
    data = bytes(64 << 20)
    frame = zstandard.compress(data)
    payload = memoryview(hash_of(frame)[:0] + _short_hash(frame) + frame)
    with pytest.raises(IntegrityError, match="unpacks to"):
        Decoder().decode(hash_of(data), Codec.ZSTD, payload, 1000)


def _short_hash(data):
    from blake3 import blake3

    return blake3(data).digest(length=16)


@pytest.mark.parametrize("codec", [2, 15, 255])
def test_unknown_compression(codec):
    with pytest.raises(IntegrityError, match="unknown"):
        Decoder().decode(hash_of(b"x"), codec, memoryview(b"x"), 1)


def test_stretches_that_do_not_compress_are_not_probed_each_time(monkeypatch):
    encoder = Encoder()
    noise = [os.urandom(65_536) for _ in range(80)]
    text = b"word " * 13_107
    codecs = [encoder.encode(memoryview(each)).codec for each in noise]
    assert set(codecs) == {Codec.PLAIN}
    codecs = [encoder.encode(memoryview(text)).codec for _ in range(20)]
    assert codecs.count(Codec.ZSTD) >= 12  # it is noticed soon
    assert codecs[-1] == Codec.ZSTD


def test_zero_hash():
    assert zero_hash(1000) == hash_of(bytes(1000))
