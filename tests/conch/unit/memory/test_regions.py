"""Registering, finding and forgetting regions; what clients may own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from tests.support.sharing import SharedObject, shared_object

from conch.core.errors import (
    AlreadyExistsError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.memory.region import CudaRegion
from conch.memory.regions import MOST_REGIONS, Regions
from conch.memory.sigbus_guard import process_guard

SIZE = 3 * 4096


class FakeCuda(CudaRegion):
    """A region on a GPU that is none."""

    closed = 0

    def check(self) -> None:
        """It is always there."""

    def tensor(self, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
        """It holds zeros."""
        return Tensor(name, datatype, shape, bytes(byte_size))

    def write(self, offset: int, byte_size: int, tensor: Tensor) -> None:
        """It forgets what is written to it."""

    def close(self) -> None:
        """Counts."""
        self.closed += 1


def open_fake(name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
    return FakeCuda(name, device_id, byte_size)


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(SIZE) as memory:
        yield memory


@pytest.fixture
def regions() -> Iterator[Regions]:
    with closing(Regions(open_cuda=open_fake)) as regions:
        yield regions
    assert not process_guard().installed


def text(error: type[ConchError], call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(error) as raised:
        call(*arguments)
    return raised.value.message


def names(regions: Regions) -> tuple[list[str], list[str]]:
    return [r.name for r in regions.system_regions()], [r.name for r in regions.cuda_regions()]


def test_regions_are_listed_by_name(regions: Regions, memory: SharedObject) -> None:
    regions.register_system("b", memory.key, 0, 100)
    regions.register_system("a", f"/{memory.key}", 4096, 8192)  # the same object once more
    regions.register_cuda("c", bytes(64), 3, 7)
    assert [(r.name, r.key, r.offset, r.byte_size) for r in regions.system_regions()] == [
        ("a", f"/{memory.key}", 4096, 8192),
        ("b", memory.key, 0, 100),
    ]
    assert [(r.name, r.device_id, r.byte_size) for r in regions.cuda_regions("c")] == [("c", 3, 7)]
    assert (regions.byte_size("system"), regions.byte_size("cuda")) == (8292, 7)


def test_status_of_what_is_not_there(regions: Regions, memory: SharedObject) -> None:
    regions.register_system("s", memory.key, 0, 100)
    regions.register_cuda("c", bytes(64), 0, 7)
    assert (
        text(NotFoundError, regions.system_regions, "x") == "Unable to find system shared memory region: 'x'"
    )
    assert text(NotFoundError, regions.cuda_regions, "x") == "Unable to find cuda shared memory region: 'x'"
    assert text(NotFoundError, regions.system_regions, "c") == (
        "The region named 'c' is registered as CUDA shared memory, not system shared memory"
    )
    assert text(NotFoundError, regions.cuda_regions, "s") == (
        "The region named 's' is registered as system shared memory, not CUDA shared memory"
    )
    assert text(NotFoundError, regions.acquire_region, "x") == "Unable to find shared memory region: 'x'"


def test_both_kinds_share_their_names(regions: Regions, memory: SharedObject) -> None:
    regions.register_system("s", memory.key, 0, 100)
    regions.register_cuda("c", bytes(64), 0, 7)
    for call in (
        lambda: regions.register_system("s", memory.key, 0, 100),
        lambda: regions.register_system("s", "nowhere", 0, 0),
        lambda: regions.register_cuda("s", bytes(64), 0, 7),
    ):
        assert text(AlreadyExistsError, call) == "shared memory region 's' already in manager"
    assert text(AlreadyExistsError, regions.register_system, "c", memory.key, 0, 1) == (
        "shared memory region 'c' already in manager"
    )


def test_unregistering_touches_one_kind_only(regions: Regions, memory: SharedObject) -> None:
    for name in "ab":
        regions.register_system(name, memory.key, 0, 100)
        regions.register_cuda(f"c{name}", bytes(64), 0, 7)
    regions.unregister_cuda("a")
    regions.unregister_system("ca")
    regions.unregister_system("x")
    assert names(regions) == (["a", "b"], ["ca", "cb"])
    regions.unregister_system("a")
    regions.unregister_cuda()
    assert names(regions) == (["b"], [])
    regions.unregister_system()
    assert names(regions) == ([], [])
    regions.register_system("a", memory.key, 0, 100)  # the name is free again


def test_a_name_that_failed_is_free(regions: Regions, memory: SharedObject) -> None:
    text(InternalError, regions.register_system, "a", "nowhere", 0, 1)
    regions.register_system("a", memory.key, 0, 1)


def test_nothing_can_be_changed_where_clients_may_not(memory: SharedObject) -> None:
    regions = Regions(False)
    for call in (
        lambda: regions.register_system("a", memory.key, 0, 1),
        lambda: regions.register_cuda("a", bytes(64), 0, 1),
        regions.unregister_system,
        regions.unregister_cuda,
    ):
        assert text(UnsupportedError, call) == (
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        )
    assert names(regions) == ([], [])


@pytest.mark.parametrize("name", ["a", "", "known"])
def test_without_a_gpu_there_is_a_text(name: str, memory: SharedObject) -> None:
    regions = Regions()
    regions.register_system("known", memory.key, 0, 1)
    try:
        assert text(InvalidArgumentError, regions.register_cuda, name, bytes(64), 0, 1) == (
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
        )
    finally:
        regions.close()


def test_a_region_needs_a_name(regions: Regions, memory: SharedObject) -> None:
    assert text(InvalidArgumentError, regions.register_system, "", memory.key, 0, 1) == (
        "'region name' is necessary to register system shared memory region"
    )
    assert text(InvalidArgumentError, regions.register_cuda, "", bytes(64), 0, 1) == (
        "'region name' is necessary to register cuda shared memory region"
    )


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        (0, 0),
        (0, SIZE + 1),
        (4096, SIZE),
        (SIZE, 1),
        (SIZE - 1, 2),
        (0, 2**63),
        (0, 2**64 - 1),
        (2**64 - 4096, 8192),
        (2**64 - 4096, 4096),
        (2**63, 1),
    ],
)
def test_a_region_lies_in_its_object(
    regions: Regions, memory: SharedObject, offset: int, byte_size: int
) -> None:
    assert text(InvalidArgumentError, regions.register_system, "a", memory.key, offset, byte_size) == (
        "failed to register shared memory region 'a': invalid args"
    )


@pytest.mark.parametrize("offset", [0, 1, 100, 4095, 4096, 5000, SIZE - 8])
def test_a_region_may_begin_anywhere(regions: Regions, memory: SharedObject, offset: int) -> None:
    memory.write(np.arange(SIZE, dtype=np.uint16).astype(np.uint8))
    regions.register_system("a", memory.key, offset, SIZE - offset)
    region = regions.acquire_region("a")
    assert (
        region.tensor(3, 4, "x", "UINT8", (4,)).numpy().tolist() == memory.read(4, offset + 3, "u1").tolist()
    )
    region.write(2, 1, Tensor.from_array("y", np.array([77], np.uint8)))
    assert memory.read(1, offset + 2, "u1") == 77
    regions.release_region(region)


def unable(regions: Regions, key: str) -> None:
    assert text(InternalError, regions.register_system, "a", key, 0, 1) == (
        f"Unable to open shared memory region: '{key}'"
    )


def test_what_is_no_object_is_not_opened(regions: Regions, memory: SharedObject) -> None:
    unable(regions, "nowhere")
    unable(regions, "/nowhere")
    link = memory.path.with_name(f"{memory.key}-link")
    for target in (memory.path, "/etc/passwd"):
        link.symlink_to(target)
        try:
            unable(regions, link.name)
        finally:
            link.unlink()
    link.mkdir()
    try:
        unable(regions, link.name)
    finally:
        link.rmdir()
    os.mkfifo(link)
    try:
        unable(regions, link.name)  # and no thread waits for a writer
    finally:
        link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.process
def test_objects_that_the_server_may_not_open_are_out_of_reach(memory: SharedObject) -> None:
    script = f"""
import os
from conch.core.errors import ConchError
from conch.memory.regions import Regions
os.setuid(65534)
regions = Regions()
try:
    regions.register_system("a", "{memory.key}", 0, 1)
except ConchError as error:
    print(error.message)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == f"Unable to open shared memory region: '{memory.key}'\n"


def test_there_are_only_so_many(memory: SharedObject) -> None:
    with closing(Regions(most=2)) as regions:
        for name in "ab":
            regions.register_system(name, memory.key, 0, 1)
        assert text(ResourceExhaustedError, regions.register_system, "c", memory.key, 0, 1) == (
            "failed to register shared memory region 'c': there are 2 regions, and there may be no more; "
            "unregister those that are not needed"
        )
        regions.unregister_system("a")
        regions.register_system("c", memory.key, 0, 1)
    assert 0 < Regions().most <= MOST_REGIONS


def test_a_region_in_use_goes_with_its_last_user(regions: Regions) -> None:
    regions.register_cuda("c", bytes(64), 0, 7)
    first, second = regions.acquire_region("c"), regions.acquire_region("c")
    assert isinstance(first, FakeCuda)
    regions.unregister_cuda("c")
    assert names(regions) == ([], [])
    text(NotFoundError, regions.acquire_region, "c")
    regions.register_cuda("c", bytes(64), 1, 8)  # the name is free at once
    regions.release_region(second)
    closed = [first.closed]
    regions.release_region(first)
    assert [*closed, first.closed] == [0, 1]
    assert regions.cuda_regions("c")[0].byte_size == 8


def test_views_keep_the_memory_mapped(regions: Regions, memory: SharedObject) -> None:
    memory.write(np.arange(4, dtype=np.float32))
    regions.register_system("a", memory.key, 0, 64)
    region = regions.acquire_region("a")
    array = region.tensor(0, 16, "x", "FP32", (4,)).numpy()
    regions.unregister_system("a")
    regions.release_region(region)
    assert array.tolist() == [0, 1, 2, 3]
    assert process_guard().installed
    del array
    assert not process_guard().installed


def test_inputs_can_not_be_written_to(regions: Regions, memory: SharedObject) -> None:
    regions.register_system("a", memory.key, 0, 64)
    region = regions.acquire_region("a")
    tensor = region.tensor(0, 16, "x", "FP32", (4,))
    for each in (tensor, tensor.renamed("z", (2, 2)), tensor.reshaped((1, 4))):
        assert each.shared
        assert not each.numpy().flags.writeable
    assert not tensor.detached("x").shared
    regions.release_region(region)


def test_strings_are_copied(regions: Regions, memory: SharedObject) -> None:
    memory.write(np.frombuffer(b"\x02\0\0\0ab", np.uint8))
    regions.register_system("a", memory.key, 0, 64)
    region = regions.acquire_region("a")
    tensor = region.tensor(0, 6, "x", "BYTES", (1,))
    memory.write(np.frombuffer(b"\xff\0\0\0zz", np.uint8))
    assert tensor.numpy().tolist() == [b"ab"]
    assert not tensor.shared
    regions.release_region(region)


@pytest.mark.parametrize("datatype", ["BOOL", "INT32", "INT64"])
def test_what_kernels_take_for_positions_is_copied(
    regions: Regions, memory: SharedObject, datatype: str
) -> None:
    """They look at it twice, and what they have found to be in bounds must stay there."""
    regions.register_system("a", memory.key, 0, 64)
    region = regions.acquire_region("a")
    tensor = region.tensor(0, 8, "x", datatype, (8 // ELEMENT_SIZES[datatype],))
    memory.write(np.full(8, 0xFF, np.uint8))
    assert not tensor.numpy().any()
    assert not tensor.shared
    regions.release_region(region)


@pytest.mark.parametrize("datatype", ["BYTES", "INT64"])
def test_no_more_is_copied_than_a_message_may_have(regions: Regions, datatype: str) -> None:
    with shared_object(2**31) as memory:  # which takes no memory
        regions.register_system("a", memory.key, 0, 2**31)
        region = regions.acquire_region("a")
        assert text(InvalidArgumentError, region.tensor, 0, 2**31, "x", datatype, (2**28,)) == (
            f"input 'x' in shared memory region 'a' has 2147483648 bytes, but of datatype {datatype} at most "
            f"2147483647 are taken"
        )
        regions.release_region(region)


def test_an_object_that_has_shrunk_is_noticed_before_it_is_touched(
    regions: Regions, memory: SharedObject
) -> None:
    regions.register_system("a", memory.key, 4096, 4096)
    region = regions.acquire_region("a")
    region.check()
    memory.resize(8191)
    assert text(InvalidArgumentError, region.check) == (
        f"shared memory region 'a' has shrunk since it was registered: it needs 8192 bytes of "
        f"'{memory.key}', which has 8191"
    )
    memory.resize(SIZE)
    region.check()  # the lost part was not touched
    regions.release_region(region)
