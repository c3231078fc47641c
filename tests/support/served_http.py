"""Checks that a server still answers over HTTP, whatever it has met."""

from __future__ import annotations

import psutil
from tests.support.raw_http import infer_body, raw_http, request
from tests.support.servers import ServerProcess

INFER = "/v2/models/probe/infer"
LIVE = "/v2/health/live"
BODY = infer_body("IN", "FP32", [1.0])


def check_served(server: ServerProcess) -> None:
    """Others get their answers, on a connection of their own."""
    with raw_http(server.http_address) as other:
        other.send(request("POST", INFER, BODY))
        response = other.response()
        assert response is not None and response.status == 200, response
        assert response.json()["outputs"][0]["data"] == [1.0]


def resident(server: ServerProcess) -> int:
    """Bytes of memory that the server has."""
    return int(psutil.Process(server.process.pid).memory_info().rss)
