"""Status details: what a client is shown of an error's text."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conch.core.errors import status_details

CUT = " …"


def on_the_wire(text: str) -> int:
    """Bytes of a status message as gRPC percent-encodes it."""
    return len(urllib.parse.quote(text, safe="".join(map(chr, range(0x20, 0x7F))).replace("%", "")))


@given(
    st.one_of(
        st.text(), st.builds(str.__mul__, st.text(min_size=1, max_size=9), st.sampled_from([500, 1400, 9999]))
    )
)
@example("x" * 4096)
@example("x" * 4097)
@example("\n" * 1365)
@example("\n" * 1366)
@example("😀" * 5000)
@example("%" * 5000)
def test_a_text_is_shown_whole_or_its_beginning(text: str) -> None:
    result = status_details(text).decode()
    whole = text.encode(errors="replace").decode()
    if result != whole:
        assert result.endswith(CUT)
        assert whole.startswith(result.removesuffix(CUT))
        assert on_the_wire(whole) > 4096
        assert on_the_wire(result.removesuffix(CUT)) > 4096 - 12
    assert on_the_wire(result) <= 4096 + on_the_wire(CUT)


@pytest.mark.parametrize("text", ["", "plain", "lone \udcff \ud800", "é" * 600])
def test_usual_texts(text: str) -> None:
    assert status_details(text) == text.encode(errors="replace")
