"""HPACK's Huffman code agrees with the `hpack` package's, on anything."""

from __future__ import annotations

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from conch.frontends.grpc.http2 import huffman

encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


def test_every_symbol() -> None:
    for symbol in range(256):
        text = bytes((symbol, symbol))
        assert huffman.decode(encoder.encode(text)) == text


@given(st.one_of(st.binary(max_size=64), st.text("abcxyz019-/.:", max_size=64).map(str.encode)))
def test_strings_round_trip(text: bytes) -> None:
    assert huffman.decode(encoder.encode(text)) == text


@given(st.binary(max_size=40))
def test_a_string_that_decodes_has_one_encoding(data: bytes) -> None:
    try:
        text = huffman.decode(data)
    except ValueError:
        return
    assert encoder.encode(text) == data


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",  # eight bits of padding
        b"\x1f\xff",  # "a" and eleven bits of padding
        b"\x18",  # "a" and padding that is not all ones
        b"\xff\xff\xff\xff",  # EOS and padding
        b"\x1f\xff\xff\xff\xfe\x1f",  # "a", EOS and "a"
        b"\xff\xff",  # an incomplete symbol
    ],
)
def test_wrong_padding_and_end_of_string(data: bytes) -> None:
    with pytest.raises(ValueError, match="ends within a symbol or contains EOS"):
        huffman.decode(data)
