"""Names that clients may use: objects, and parts of regions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch.memory.region import check_part, object_name

NUMBERS = st.one_of(
    st.integers(-(2**64), 2**65),
    st.integers(-8, 8),
    *(st.integers(edge - 8, edge + 8) for edge in (4096, 2**31, 2**32, 2**63, 2**64)),
)


@given(size=st.one_of(st.integers(1, 2**63), st.integers(1, 64)), offset=NUMBERS, byte_size=NUMBERS)
def test_a_part_that_passes_lies_in_the_region(size: int, offset: int, byte_size: int) -> None:
    inside = offset >= 0 and byte_size > 0 and offset + byte_size <= size
    try:
        check_part("r", size, offset, byte_size)
    except InvalidArgumentError as error:
        assert not inside
        bad_offset = not 0 <= offset < size
        unsigned = byte_size + 2**64 if byte_size < 0 else byte_size
        if not bad_offset and offset + unsigned >= 2**64:
            assert error.message == (
                f"Integer overflow detected: byte_size ({unsigned}) + offset ({offset}) exceeds "
                f"maximum value ({2**64 - 1}) for region 'r'"
            )
            return
        what = "Invalid offset" if bad_offset else "Invalid offset + byte size"
        assert error.message == f"{what} for shared memory region: 'r'"
    else:
        assert inside


@pytest.mark.parametrize("key", ["a", "/a", "//a", "a b", "…", "a.b", "psm_1234", "x" * 255, ".a"])
def test_the_name_is_the_key_without_slashes_in_front(key: str) -> None:
    assert object_name("r", key) == key.lstrip("/")


@pytest.mark.parametrize(
    "key",
    ["", "/", "//", ".", "..", "/..", "a/b", "../etc/passwd", "a/", "x" * 256, "é" * 128, "a\0b", "\ud800"],
)
def test_what_is_no_name_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        object_name("r", key)
    shown = key.encode(errors="backslashreplace").decode()
    assert raised.value.message == f"cannot register shared memory region 'r' - invalid shm key '{shown}'"


@pytest.mark.parametrize(
    "prefix", ["triton_python_backend_shm_region_", "conch_", "sem.", "nccl-", "cuda.shm."]
)
def test_names_of_servers_and_libraries_are_reserved(prefix: str) -> None:
    for key in (f"{prefix}1", f"/{prefix}1", prefix):
        with pytest.raises(InvalidArgumentError) as raised:
            object_name("r", key)
        assert raised.value.message == (
            f"cannot register shared memory region 'r' with key '{key}' as the key contains the reserved "
            f"prefix '{prefix}'"
        )


@given(st.text())
def test_any_key_gives_a_name_in_the_directory_or_an_error(key: str) -> None:
    try:
        name = object_name("r", key)
    except InvalidArgumentError:
        return
    assert name not in ("", ".", "..")
    assert "/" not in name
    assert "\0" not in name
