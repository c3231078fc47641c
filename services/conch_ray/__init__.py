"""conch as a deployment of Ray Serve; see docs/ray.md.

`ConchDeployment` is an ordinary Ray Serve deployment: `options` takes Ray's options, `bind` the arguments of
`ConchReplica`; `build_app` is the same for config files. Ray's proxies import this package for
`add_GRPCInferenceServiceServicer_to_server`, so the rest is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch_ray.replica import ConchDeployment, ConchReplica, build_app
    from conch_ray.saturation import SATURATION, SaturationPolicy
    from conch_ray.servicer import add_GRPCInferenceServiceServicer_to_server

__all__ = [
    "SATURATION",
    "ConchDeployment",
    "ConchReplica",
    "SaturationPolicy",
    "add_GRPCInferenceServiceServicer_to_server",
    "build_app",
]

_MODULE_OF = {
    "ConchDeployment": "replica",
    "ConchReplica": "replica",
    "SATURATION": "saturation",
    "SaturationPolicy": "saturation",
    "add_GRPCInferenceServiceServicer_to_server": "servicer",
    "build_app": "replica",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(_import_module(f"{__name__}.{module}"), name)
