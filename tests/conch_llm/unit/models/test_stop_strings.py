"""Stop strings in texts that come in pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.profiles import scaled

from conch_llm.models.answers import StopCutter


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=scaled(300))
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    cutter = StopCutter(stops)
    sent, match = "", None
    for piece in pieces:
        text, match = cutter.add(piece)
        sent += text
        if match is not None:
            break
    else:
        sent += cutter.rest()
    assert (sent, match) == cut("".join(pieces), stops)
