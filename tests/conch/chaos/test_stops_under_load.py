"""Servers that are stopped again and again under gRPC, HTTP and stream load: no request is lost.

`CONCH_STOPS` sets how often; a thousand take an hour. `--log-cli-level=info` shows how far it is.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from tests.support.draining import Load
from tests.support.servers import eventually, serving_process
from tests.support.steered import Steering

log = logging.getLogger(__name__)

STOPS = int(os.environ.get("CONCH_STOPS", "15"))
NOTICE_S = 0.2
"""From the server's readiness to the clients' end, as a load balancer takes it to remove an endpoint."""
DELAY_S = 0.7


@pytest.mark.timeout(1800 + 30 * STOPS)
def test_stops_lose_nothing_while_endpoints_are_removed(tmp_path: Path, grpc_is_warm: None) -> None:
    lost: list[tuple[int, tuple[str, str]]] = []
    for stop in range(STOPS):
        (at := tmp_path / str(stop)).mkdir()
        steering = Steering(at)
        steering.write(at / "models", "m", 1)
        with serving_process(at / "models", flags=[f"--drain-delay={DELAY_S}"]) as server:
            load = Load(server.address, "m", True, server.http_address, NOTICE_S)
            eventually(lambda load=load: load.completed > 100, "there is load")  # type: ignore[misc]
            server.signal(signal.SIGTERM)
            load.join()
            assert server.wait() == 0, server.errors
        lost += [(stop, failure) for failure in load.failures]
        assert steering.ran() == load.completed, f"stop {stop}: what was run was answered"
        log.info("stop %d of %d: %d requests, %d lost", stop + 1, STOPS, load.completed, len(load.failures))
    assert lost == []
