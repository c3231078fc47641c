"""The table of functions of Triton's interfaces, and the cache of the system's loader."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.libraries import Libraries

from conch_engines.native.api_names import SINCE, VERSIONS, api_of
from conch_engines.native.ld_cache import read_ld_cache


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
