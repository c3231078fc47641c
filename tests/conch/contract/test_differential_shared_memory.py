"""The same regions and requests for a real Triton and for conch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.cases.region_cases import BAD_KEYS, CALLS, REQUESTS, SIZE, part, request_of, write_adding
from tests.support.peers import NEEDS_TRITON, Both, compare, outcomes, serving_both
from tests.support.servers import eventually
from tests.support.sharing import SharedObject, register_request, shared_object
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    repository = tmp_path_factory.mktemp("both")
    write_adding(repository)
    with serving_both(repository) as both:
        yield both


@pytest.fixture(autouse=True)
def memory(both: Both) -> Iterator[SharedObject]:
    """An object that is registered as region `r`."""
    with shared_object(SIZE) as memory:
        memory.write(np.arange(16, dtype=np.float32))
        compare(both, register_request("r", memory.key, SIZE))
        yield memory
        unregister = service_pb2.SystemSharedMemoryUnregisterRequest(name="r")
        # Triton responds to a request before it lets go of the region.
        eventually(lambda: not any(outcomes(both, unregister)), "both unregister the region")


def test_tensors_in_regions(both: Both, memory: SharedObject) -> None:
    compare(both, request_of(part(), None))
    compare(both, request_of(part(), part(offset=4096)))
    assert memory.read(16, 4096).tolist() == list(range(1, 17))
    compare(both, request_of(None, part(byte_size=100, offset=4096), bytes(64)))
    assert memory.read(16, 4096).tolist() == [1] * 16


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(both: Both, name: str) -> None:
    compare(both, REQUESTS[name].message)


@pytest.mark.parametrize("name", CALLS)
def test_calls(both: Both, name: str) -> None:
    compare(both, CALLS[name].message)


def test_status_and_size(both: Both, memory: SharedObject) -> None:
    for name in ("r", ""):
        compare(both, service_pb2.SystemSharedMemoryStatusRequest(name=name))
    compare(both, service_pb2.SystemSharedMemoryUnregisterRequest(name="r"))
    compare(both, register_request("bad", memory.key, SIZE + 1))


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_differ(both: Both, key: str) -> None:
    assert outcomes(both, register_request("bad", key, 1)) == (
        ("INTERNAL", f"Unable to open shared memory region: '{key}'"),
        ("INVALID_ARGUMENT", f"cannot register shared memory region 'bad' - invalid shm key '{key}'"),
    )
