"""From the objects of a repository to models and directories."""

from __future__ import annotations

from pathlib import PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from conch_stores.stores import StoredObject, by_model, contents_of, is_safe


def item(path: str, size: int = 1, identity: str = "e", mtime_ns: int = 7) -> StoredObject:
    return StoredObject(path, size, identity, mtime_ns)


def test_models_are_what_has_something_below_it() -> None:
    objects = [item("top"), item("m/config.pbtxt"), item("m/1/x"), item("n/", 0), item("../1/x"), item("/x")]
    assert {name: len(found) for name, found in by_model(objects).items()} == {"m": 2, "n": 1}


def test_contents() -> None:
    objects = [
        item("m/", 0),
        item("m/config.pbtxt"),
        item("m/1/a/x"),
        item("m/2/", 0),
        item("m/3", 0),
        item("m/3/y"),
        item("m/1/__pycache__/model.pyc"),
        item("m/1/__pycache__/", 0),
    ]
    contents = contents_of("m", objects)
    assert not contents.problem
    assert sorted(contents.files) == ["1/a/x", "3/y", "config.pbtxt"]
    assert contents.directories == {"1", "1/a", "2", "3"}
    assert contents.fingerprint == (
        ("1/", 0, 0, 0),
        ("1/a/", 0, 0, 0),
        ("1/a/x", 1, 0, "e"),
        ("2/", 0, 0, 0),
        ("3/", 0, 0, 0),
        ("3/y", 1, 0, "e"),
        ("config.pbtxt", 1, 0, "e"),
    )


def test_the_time_counts_where_there_is_no_identity() -> None:
    assert contents_of("m", [item("m/x", identity="")]).fingerprint == (("x", 1, 7, ""),)


def test_what_no_directory_can_hold() -> None:
    for path in ("m/../x", "m/a//x", "m/./x", "m/a\0", "m/" + "x" * 256, "m//"):
        assert "can't be that of a file" in contents_of("m", [item(path)]).problem, path
    assert "is an object and a directory" in contents_of("m", [item("m/1"), item("m/1/x")]).problem


PATHS = st.lists(st.sampled_from(["a", "b", "1", "..", ".", "", "__pycache__"]), min_size=1, max_size=5)


@given(st.lists(st.tuples(PATHS.map("/".join), st.integers(0, 2)), max_size=8))
def test_whatever_there_is_makes_a_directory_or_is_refused(objects: list[tuple[str, int]]) -> None:
    contents = contents_of("m", [item(f"m/{path}", size) for path, size in dict(objects).items()])
    assert all(is_safe(part) for path in contents.files for part in path.split("/"))
    if not contents.problem:
        assert not contents.files.keys() & contents.directories
        for path in (*contents.files, *contents.directories):
            above = {str(parent) for parent in PurePosixPath(path).parents} - {"."}
            assert above <= contents.directories
