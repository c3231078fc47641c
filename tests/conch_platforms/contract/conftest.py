"""One server for all contract tests that only ask it things."""

from __future__ import annotations

from tests.support.contract_server import client, placement, raw, server, servers, signal_files
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["client", "grpc_is_warm", "placement", "raw", "server", "servers", "signal_files"]
