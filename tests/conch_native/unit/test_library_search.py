"""Search for libraries of backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.backend import Backend
from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.workers.backend_directory import backends_within
from conch.workers.python_based import PythonBasedBackend
from conch_engines.native.library_search import find_library
from conch_engines.native.native_backend import NativeBackend

PLACES = ["model/1/libtriton_b.so", "model/libtriton_b.so", "backends/b/libtriton_b.so"]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def find(root: Path, runtime: str = "") -> Path:
    model = root / "model"
    return find_library("m", "b", runtime, model, model / "1", root / "backends")


@pytest.mark.parametrize("first", range(3))
def test_the_nearest_library_wins(tmp_path: Path, first: int) -> None:
    touch(tmp_path, *PLACES[first:])
    assert find(tmp_path) == tmp_path / PLACES[first]


@pytest.mark.parametrize("place", ["model/1", "model", "backends/b"])
def test_the_runtime_names_another_file(tmp_path: Path, place: str) -> None:
    touch(tmp_path, *PLACES, f"{place}/other.so")
    assert find(tmp_path, "other.so") == tmp_path / place / "other.so"


def test_what_is_not_found_is_named_with_its_places(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match="unable to find backend library for backend 'b', try spec"
    ):
        find(tmp_path)
    with pytest.raises(InvalidArgumentError) as raised:
        find(tmp_path, "other.so")
    places = " ".join(f"'{tmp_path / place / 'other.so'}'" for place in ("model/1", "model", "backends/b"))
    assert (
        str(raised.value) == f"unable to find backend library 'other.so' for model 'm', searched: {places} "
    )


@pytest.mark.parametrize("runtime", ["../b.so", "/tmp/b.so", "a/../../b.so"])
def test_a_runtime_stays_within_the_directories(tmp_path: Path, runtime: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{runtime}' escapes backend directory"):
        find(tmp_path, runtime)


@pytest.mark.parametrize("place", ["model/1", "model", "backends/b"])
def test_libraries_for_custom_batching_are_refused(tmp_path: Path, place: str) -> None:
    touch(tmp_path, *PLACES, f"{place}/batchstrategy.so")
    with pytest.raises(UnsupportedError, match=f"custom batching by a library .*'{tmp_path / place}"):
        find(tmp_path)


def no_backend(name: str) -> Backend:
    raise InvalidArgumentError(f"no backend '{name}'")


def test_installed_backends_come_before_libraries_unless_the_runtime_names_one(tmp_path: Path) -> None:
    installed = PythonBasedBackend(tmp_path)
    touch(tmp_path, PLACES[2])
    get = backends_within(tmp_path / "backends", lambda name: installed)
    assert get("b", "", tmp_path / "model") is installed
    assert isinstance(get("b", "libtriton_b.so", tmp_path / "model"), NativeBackend)
    assert get("c", "libtriton_c.so", tmp_path / "model") is installed  # its own runtime by Triton's name
    assert isinstance(get("c", "other.so", tmp_path / "model"), NativeBackend)


def test_libraries_come_before_python_based_backends(tmp_path: Path) -> None:
    touch(tmp_path, "backends/b/model.py")
    get = backends_within(tmp_path / "backends", no_backend)
    assert isinstance(get("b", "", tmp_path / "model"), PythonBasedBackend)
    touch(tmp_path, PLACES[0])
    assert isinstance(get("b", "", tmp_path / "model"), NativeBackend)
    assert isinstance(get("b", "model.py", tmp_path / "model"), PythonBasedBackend)
    for name in ("c", "../b", "{b}"):
        with pytest.raises(InvalidArgumentError, match="no backend"):
            get(name, "", tmp_path / "model")
