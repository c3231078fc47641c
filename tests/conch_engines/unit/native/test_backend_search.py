"""Where a backend's library is found, and Triton's texts where it is not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.libraries import Libraries

from conch.core.errors import InvalidArgumentError
from conch_engines.native.api_names import SINCE, VERSIONS, api_of
from conch_engines.native.ld_cache import read_ld_cache
from conch_engines.native.search import BackendFile, find_backend_file


class Place:
    """A model `m` with version 1, and a backend directory."""

    def __init__(self, directory: Path) -> None:
        self.version = directory / "m" / "1"
        self.backends = directory / "backends"
        self.directories = (self.version, self.version.parent, self.backends / "b")
        for each in self.directories:
            each.mkdir(parents=True, exist_ok=True)

    def find(self, backend: str = "b", runtime: str = "", shared: bool = True) -> BackendFile:
        return find_backend_file(backend, runtime, "m", self.version, self.backends if shared else None)

    def refusal(self, backend: str = "b", runtime: str = "", shared: bool = True) -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            self.find(backend, runtime, shared)
        return caught.value.message


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("runtime", ["", "own.so", "folder/own.so"])
def test_the_version_comes_before_the_model_and_this_before_the_backend(place: Place, runtime: str) -> None:
    (place.backends / "b" / "model.py").touch()
    name = runtime or "libtriton_b.so"
    for directory in reversed(place.directories):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert place.find(runtime=runtime) == BackendFile(path, directory)
        assert place.find(runtime=runtime).is_library


def test_python_based_backends(place: Place) -> None:
    path = place.backends / "b" / "model.py"
    assert place.refusal(runtime="model.py") == (
        f"unable to find backend library 'model.py' for model 'm', searched: '{path}' "
    )
    path.touch()
    found = place.find()
    assert (found.path, found.is_library) == (path, False)
    (place.version / "libtriton_b.so").touch()
    assert place.find().is_library
    assert place.find(runtime="model.py") == found


def test_texts_of_what_is_not_found(place: Place) -> None:
    (place.backends / "x.so").touch()
    nothing = (
        "unable to find backend library for backend '{}', try specifying runtime on the model configuration."
    )
    assert place.refusal() == nothing.format("b")
    assert place.refusal("../b") == nothing.format("../b")
    searched = "".join(f"'{each / 'x.so'}' " for each in place.directories)
    assert place.refusal(runtime="x.so") == (
        f"unable to find backend library 'x.so' for model 'm', searched: {searched}"
    )
    assert place.backends.name not in place.refusal(runtime="x.so", shared=False)
    for runtime in ("../x.so", "/x.so", "a/../../x.so", ".."):
        assert place.refusal(runtime=runtime) == (
            f"backend library name '{runtime}' escapes backend directory '{place.backends / 'b'}', for model "
            f"'m', check model config runtime field"
        )


def test_functions_of_all_apis() -> None:
    assert len(SINCE) == 281
    assert {api_of(name) for name in SINCE} == set(VERSIONS)
    newest = {api: max(minor for name, minor in SINCE.items() if api_of(name) == api) for api in VERSIONS}
    assert newest["TRITONBACKEND"] == VERSIONS["TRITONBACKEND"][1]
    assert newest["TRITONSERVER"] == VERSIONS["TRITONSERVER"][1]
    assert all(minor <= VERSIONS[api][1] for api, minor in newest.items())


@pytest.mark.parametrize("layout", ["new", "compat"])
def test_the_cache_of_the_loader_is_read_as_ldconfig_writes_it(libraries: Libraries, layout: str) -> None:
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        pytest.skip("no ldconfig to write a cache with")
    library = libraries.build("libcached.so.3", "int cached(void) { return 0; }")
    cache = libraries.directory / "cache"
    command = [ldconfig, "-X", "-c", layout, "-C", str(cache), "-f", "/dev/null", str(libraries.directory)]
    subprocess.run(command, check=True, capture_output=True)
    assert read_ld_cache(cache)["libcached.so.3"] == [str(library)]
    whole = cache.read_bytes()

    @given(
        st.integers(0, len(whole)), st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), max_size=4)
    )
    def check(end: int, changes: list[tuple[int, int]]) -> None:
        content = bytearray(whole)
        for place, byte in changes:
            content[place] = byte
        cache.write_bytes(content[:end])
        read_ld_cache(cache)

    check()
    assert read_ld_cache(libraries.directory / "none") == {}
