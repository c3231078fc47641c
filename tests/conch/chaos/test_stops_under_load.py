"""Servers that are stopped again and again under gRPC, HTTP and stream load: no request is lost.

`CONCH_STOPS` sets how often; a thousand take an hour. `--log-cli-level=info` shows how far it is.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from tests.support.draining import Load
from tests.support.servers import eventually, serving_process
from tests.support.steered import Steering
from tests.support.waiting import given_time

log = logging.getLogger(__name__)

STOPS = int(os.environ.get("CONCH_STOPS", "15"))
NOTICE_S = 0.2
"""From the server's readiness to the clients' end, as a load balancer takes it to remove an endpoint."""
DELAY_S = 0.7


@pytest.mark.timeout(1200 + 60 * STOPS)
def test_stops_lose_nothing_while_endpoints_are_removed(tmp_path: Path, grpc_is_warm: None) -> None:
    lost: list[tuple[Path, tuple[str, str]]] = []

    def stop(delay_s: float) -> bool:
        """Stops a server; False if its clients took longer than the delay to end."""
        at = Path(tempfile.mkdtemp(dir=tmp_path))
        steering = Steering(at)
        steering.write(at / "models", "m", 1)
        with serving_process(at / "models", flags=[f"--drain-delay={delay_s:g}"]) as server:
            load = Load(server.address, "m", True, server.http_address, NOTICE_S)
            eventually(lambda: load.completed > 100, "there is load")
            before = time.monotonic()
            server.signal(signal.SIGTERM)
            load.join()
            in_time = time.monotonic() - before < delay_s
            assert server.wait() == 0, server.errors
        if in_time:
            lost.extend((at, failure) for failure in load.failures)
        assert steering.ran() == load.completed, f"{at}: what was run was answered"
        log.info("%d requests, %d lost", load.completed, len(load.failures))
        return in_time

    for number in range(STOPS):
        log.info("stop %d of %d", number + 1, STOPS)
        given_time(stop, DELAY_S)
    assert lost == []
