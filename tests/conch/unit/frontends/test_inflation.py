"""Decompression in steps gives what zlib gives at once, and as much as its limits allow."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.frontends import inflation
from conch.frontends.inflation import inflate

ANY = zlib.MAX_WBITS | 32
STEPS = st.integers(1, 300)
DATA = st.binary(max_size=500) | st.integers(0, 3000).map(bytes)


@given(DATA, STEPS, STEPS, st.integers(0, 9), st.data())
def test_any_steps(data: bytes, step: int, input_step: int, level: int, drawn: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inflation, "STEP_BYTES", step)
        patch.setattr(inflation, "INPUT_STEP_BYTES", input_step)
        patch.setattr(inflation, "yield_gil", lambda: None)
        for packed in (zlib.compress(data, level), gzip.compress(data, level)):
            held: list[int] = []
            behind = drawn.draw(st.sampled_from([b"", b"more", packed]))
            plain, left = inflate(packed + behind, ANY, len(data), held.append)
            assert (bytes(plain), left) == (data, len(behind))
            assert sum(held) == len(data)
            assert max(held) <= step
            cut = drawn.draw(st.integers(0, len(packed) - 1))
            found, left = inflate(packed[:cut], ANY, len(data), held.append)
            assert (data.startswith(found), left) == (True, None)
            if data:
                most = drawn.draw(st.integers(0, len(data) - 1))
                assert inflate(packed, ANY, most, held.append).plain == data[: most + 1]


def test_a_refusal_ends_it() -> None:
    taken = 0

    def hold(size: int) -> None:
        nonlocal taken
        taken += size
        if taken > 3 << 20:
            raise MemoryError

    with pytest.raises(MemoryError):
        inflate(zlib.compress(bytes(1 << 26)), ANY, 1 << 30, hold)
    assert taken <= 4 << 20
