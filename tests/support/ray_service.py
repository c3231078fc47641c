"""Runs a local Ray with Ray Serve and conch's deployment; a script for the interpreter that has Ray.

Arguments: the gRPC port, the HTTP port, Ray's folder. Each line of standard input is an application in JSON:
its name, `options` of the deployment, `repositories` and `flags`. The answer is a line: ``ready``, or
``failed`` and why. Ends with its standard input.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, gRPCOptions

from conch.ray import ConchDeployment, SaturationPolicy

_SERVICER = "conch.ray.add_GRPCInferenceServiceServicer_to_server"


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
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            deploy(**json.loads(line))
        except Exception as error:
            print("failed", repr(str(error)), flush=True)
        else:
            print("ready", flush=True)
    serve.shutdown()
    ray.shutdown()


def deploy(name: str, options: dict[str, object], repositories: list[str], flags: dict[str, object]) -> None:
    """Deploys an application, or a new config of it; returns when it is ready."""
    scaling = options.pop("saturation", None)
    if scaling is not None:
        policy = AutoscalingPolicy(policy_function=SaturationPolicy, policy_kwargs={"target": 0.5})
        options["autoscaling_config"] = AutoscalingConfig(policy=policy, **scaling)
    options["ray_actor_options"] = {"num_cpus": 0}
    deployment = ConchDeployment.options(**options)
    serve.run(deployment.bind(*repositories, **flags), name=name, route_prefix=f"/{name}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
