"""One server for all contract tests that only ask it things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tests.support.grpc_transports import TRANSPORTS
from tests.support.servers import (
    EXAMPLES,
    AnyServer,
    RawClient,
    client_of,
    serving,
    write_model,
    write_probe,
)

REPEATER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEATER_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
    model_transaction_policy { decoupled: true }
"""
CASTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("O" + tensor.name(), tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]
"""
CASTER_TYPES = ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16",
                "FP32", "FP64", "STRING")  # fmt: skip
CASTER_CONFIG = 'backend: "python"\n' + "".join(
    f'input {{ name: "{kind}" data_type: TYPE_{kind} dims: [ -1 ] optional: true }}\n'
    f'output {{ name: "O{kind}" data_type: TYPE_{kind} dims: [ -1 ] }}\n'
    for kind in CASTER_TYPES
)
MOST_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], AnyServer]]:
    """A server for each transport of gRPC, with the examples and models written for these tests."""
    with ExitStack() as stack:

        @cache
        def serve(transport: str) -> AnyServer:
            return stack.enter_context(_serving(tmp_path_factory.mktemp("models"), *TRANSPORTS[transport]))

        yield serve


@pytest.fixture(scope="module")
def server(servers: Callable[[str], AnyServer], grpc_transport: str) -> AnyServer:
    """The server for the module's transport."""
    return servers(grpc_transport)


@contextmanager
def _serving(repository: Path, *flags: str) -> Iterator[AnyServer]:
    write_probe(repository)
    write_probe(
        repository,
        "four",
        "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 600000000 }",
    )
    write_probe(
        repository,
        "impatient",
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000 } }",
    )
    write_probe(repository, "versions", "version_policy { all { } }", versions=(1, 3))
    write_model(repository, "repeater", REPEATER_CONFIG, {"model.py": REPEATER})
    write_model(repository, "caster", CASTER_CONFIG, {"model.py": CASTER})
    flags = (*flags, f"--grpc-max-message-bytes={MOST_BYTES}")
    with serving(EXAMPLES, repository, flags=flags) as server:
        # gRPC keeps some file descriptors and threads from its first call on.
        with client_of(server) as client:
            assert client.is_server_ready()
        yield server


@pytest.fixture
def client(server: AnyServer) -> Iterator[triton.InferenceServerClient]:
    """A client of that server."""
    with client_of(server) as client:
        yield client


@pytest.fixture
def raw(server: AnyServer) -> Iterator[RawClient]:
    """A client of that server that sends whatever it is given."""
    with closing(RawClient(server.address)) as raw:
        yield raw


@pytest.fixture
def signal_files(tmp_path: Path) -> tuple[Path, Path]:
    """Two paths for a probe model: it creates the first when it starts, and waits for the second."""
    return tmp_path / "started", tmp_path / "go"


@pytest.fixture(scope="module", params=["in_process", "worker"])
def placement(request: pytest.FixtureRequest) -> str:
    """The flag that has Python models run in the server's process, and the one that gives each its own."""
    return f"--backend-config=python,placement={request.param}"
