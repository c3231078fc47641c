"""`conch serve` loads grpcio only where something is served with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.servers import check_simple, client_of, serving_process, simple_inputs


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        (["--grpc-transport=own"], False),
        (["--grpc-transport=grpcio"], True),
    ],
)
def test_a_serving_process_loads_grpcio(repository: Path, flags: list[str], loaded: bool) -> None:
    with serving_process(repository, flags=flags) as server, client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs()))
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert ("/grpc/_cython/cygrpc" in mapped) is loaded
