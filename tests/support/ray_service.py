"""Runs a local Ray with Ray Serve and conch's deployment; a script for the interpreter that has Ray.

Arguments: the gRPC port, the HTTP port, Ray's folder. Each line of standard input is an application in JSON,
as in Ray Serve's config files; it replaces the one of its name. The answer is a line: ``ready``, or
``failed`` and why. Ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.schema import ServeDeploySchema

_SERVICER = "conch_ray.add_GRPCInferenceServiceServicer_to_server"


def main(grpc_port: int, http_port: int, folder: str) -> None:
    """Runs until standard input ends."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": http_port},
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[_SERVICER]),
    )
    # What `serve deploy` has the dashboard call.
    client = serve.context._get_global_client()
    answer("ready")
    applications: dict[str, Any] = {}
    for line in sys.stdin:
        application = json.loads(line)
        applications[application["name"]] = application
        try:
            client.deploy_apps(ServeDeploySchema(applications=list(applications.values())), _blocking=True)
        except Exception as error:
            answer(f"failed {str(error)!r}")
        else:
            answer("ready")
    serve.shutdown()
    ray.shutdown()


def answer(text: str) -> None:
    """Writes a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
