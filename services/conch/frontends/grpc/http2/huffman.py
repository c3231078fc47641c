"""Decodes HPACK's Huffman code (RFC 7541, section 5.2 and appendix B).

The decoder is an automaton over bytes. Its states are the inner nodes of the code's tree; a node maps a byte
to the node after its eight bits and the text that they complete. Such a step is found bit by bit when it is
first taken and kept for all later strings of the process, so an import builds the tree only, and common text
costs one lookup per byte. There are 257 states, hence at most 65,792 steps, which take 8 MB.
"""

from __future__ import annotations

# Appendix B. The code is canonical: codes rise with length, then with symbol, so that lengths define it.
_SYMBOLS_BY_LENGTH = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\x00$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\\xc3\xd0",
    20: b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2",
    21: b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6",
    22: b"\x81\x84\x85\x86\x88\x92\x9a\x9c\xa0\xa3\xa4\xa9\xaa\xad\xb2\xb5\xb9\xba\xbb\xbd\xbe\xc4"
    b"\xc6\xe4\xe8\xe9",
    23: b"\x01\x87\x89\x8a\x8b\x8c\x8d\x8f\x93\x95\x96\x97\x98\x9b\x9d\x9e\xa5\xa6\xa8\xae\xaf\xb4"
    b"\xb6\xb7\xbc\xbf\xc5\xe7\xef",
    24: b"\t\x8e\x90\x91\x94\x9f\xab\xce\xd7\xe1\xec\xed",
    25: b"\xc7\xcf\xea\xeb",
    26: b"\xc0\xc1\xc8\xc9\xca\xcd\xd2\xd5\xda\xdb\xee\xf0\xf2\xf3\xff",
    27: b"\xcb\xcc\xd3\xd4\xd6\xdd\xde\xdf\xf1\xf4\xf5\xf6\xf7\xf8\xfa\xfb\xfc\xfd\xfe",
    28: b"\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x10\x11\x12\x13\x14\x15\x17\x18\x19\x1a\x1b"
    b"\x1c\x1d\x1e\x1f\x7f\xdc\xf9",
    30: b"\n\r\x16",
}
_LONGEST_PADDING = 7


class _State(dict[int, "tuple[_State, bytes]"]):
    """A node of the tree; as a dict, the steps from it that were taken before."""

    __slots__ = ("branches", "may_end", "symbol")

    def __init__(self, may_end: bool) -> None:
        self.branches: list[_State] = []  # for bit 0 and bit 1; none in a leaf
        self.may_end = may_end  # whether the bits from the root to here are padding
        self.symbol = b""

    def __missing__(self, byte: int) -> tuple[_State, bytes]:
        state, text = self, b""
        for shift in range(7, -1, -1):
            state = state.branches[byte >> shift & 1]
            if not state.branches:
                text += state.symbol
                state = _ROOT
        self[byte] = state, text
        return state, text


_ROOT = _State(True)


def _grow() -> None:
    level = [_ROOT]
    for length in range(1, max(_SYMBOLS_BY_LENGTH) + 1):
        for state in level:
            state.branches = [_State(False), _State(state.may_end and length <= _LONGEST_PADDING)]
        level = [branch for state in level for branch in state.branches]
        symbols = _SYMBOLS_BY_LENGTH.get(length, b"")
        for leaf, symbol in zip(level, symbols, strict=False):
            leaf.symbol = bytes((symbol,))
        level = level[len(symbols) :]
    # EOS is 30 ones, and an error wherever it is met: nothing leads out of it, and no string may end there.
    (end,) = level
    end.branches = [end, end]


_grow()


def decode(data: bytes) -> bytes:
    """Decodes a string.

    Raises:
        ValueError: The string contains EOS, or its padding is longer than 7 bits or not all ones.
    """
    state = _ROOT
    parts = []
    for byte in data:
        state, text = state[byte]
        parts.append(text)
    if not state.may_end:
        raise ValueError("a Huffman-coded string ends within a symbol or contains EOS")
    return b"".join(parts)
