"""Changes between two states of a model's files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch_control.repository.layout import changed_paths, shortened_paths, without_editor_files

entries = st.tuples(st.sampled_from(["1/model.py", "1/helper.py", "config.pbtxt"]), st.integers(0, 2))
states = st.dictionaries(
    st.sampled_from(["1/model.py", "1/helper.py", "config.pbtxt"]), st.integers(0, 2)
).map(lambda found: tuple(sorted((path, size, 0, 0) for path, size in found.items())))


@given(before=states, after=states)
def test_differing(
    before: tuple[tuple[str, int, int, int], ...], after: tuple[tuple[str, int, int, int], ...]
) -> None:
    old, new = ({path: size for path, size, *_ in state} for state in (before, after))
    expected = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
    assert changed_paths(before, after) == tuple(sorted(expected))


def test_some() -> None:
    assert shortened_paths(["a", "b", "c"]) == "a, b, c"
    assert shortened_paths(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


@pytest.mark.parametrize(
    "path", ["1/.model.py.swp", "1/4913", "1/model.py~", "1/.#model.py", "1/#model.py#", "x.tmp", "x.orig"]
)
def test_files_of_editors(path: str) -> None:
    assert without_editor_files(((path, 1, 2, 3), ("1/model.py", 1, 2, 3))) == (("1/model.py", 1, 2, 3),)


@pytest.mark.parametrize(
    "path", ["1/model.py", "1/swp", "1/weights.npz", ".hidden", "1/", "49130", "1/a#b.py"]
)
def test_files_of_models(path: str) -> None:
    assert without_editor_files(((path, 1, 2, 3),)) == ((path, 1, 2, 3),)
