"""Settings of a TensorRT model: parameters, options of the backend, profiles and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch_engines.model_config import boolean
from conch_engines.tensorrt.optimization_profiles import Dims

ALLOCATION_STRATEGY = "execution_context_allocation_strategy"

PARAMETERS = (ALLOCATION_STRATEGY,)

_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")
_POLICIES = ("DEVICE_BLOCKING", "BLOCKING")
_MULTI_DEVICE = ("enable_multi_device", "multi_device_gpus", "multi_device_per_rank_engines")
_USUAL_GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A CUDA graph to capture.

    Attributes:
        batch_size: Rows of its batch; 0 for a model without batching.
        dims: Dims by input, batch dimension excluded; those of the profile's optimum where left out.
        least_batch_size: Smallest batch that it may run, with rows to spare.
    """

    batch_size: int
    dims: Mapping[str, Dims]
    least_batch_size: int


@dataclass(frozen=True, slots=True)
class TensorRTSettings:
    """Settings of one model.

    Attributes:
        strategy: Name of the `ExecutionContextAllocationStrategy`.
        high_priority: True if its streams come before others of the device.
        graphs: CUDA graphs to capture.
        host_code_allowed: True if plans may bring a runtime of their own, which is code.
        plugins: Libraries of plugins to load.
    """

    strategy: str
    high_priority: bool
    graphs: tuple[GraphSpec, ...]
    host_code_allowed: bool
    plugins: tuple[str, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> TensorRTSettings:
        """The settings in a config."""
        options = spec.backend_options
        strategy = spec.parameters.get(ALLOCATION_STRATEGY, "STATIC")
        if strategy not in _STRATEGIES:
            raise InvalidArgumentError(
                f"Invalid value for '{ALLOCATION_STRATEGY}': '{strategy}' for model instance '{spec.name}'. "
                f"Supported values are 'STATIC' and 'ON_PROFILE_CHANGE'."
            )
        for key in _MULTI_DEVICE:
            if key in spec.parameters:
                raise UnsupportedError(
                    f"parameter '{key}' of model '{spec.name}' is not supported: an engine runs on one GPU"
                )
        policy = options.get("execution-policy", _POLICIES[0])
        if policy not in _POLICIES:
            raise InvalidArgumentError(
                f"backend option 'execution-policy' must be one of {', '.join(_POLICIES)}, got '{policy}'"
            )
        optimization = spec.config.get("optimization")
        optimization = optimization if isinstance(optimization, Mapping) else {}
        return cls(
            strategy,
            optimization.get("priority") in ("PRIORITY_MAX", 1),
            _graph_specs(spec, optimization.get("cuda") or {}),
            host_code_allowed(options),
            plugins(options),
        )


def host_code_allowed(options: Mapping[str, str]) -> bool:
    """The option ``version-compatible``."""
    return boolean(options, "version-compatible", False)


def plugins(options: Mapping[str, str]) -> tuple[str, ...]:
    """The option ``plugins``: paths separated by semicolons."""
    return tuple(path for path in options.get("plugins", "").split(";") if path)


def check_kinds(spec: ModelSpec) -> None:
    """Checks that all instances are on GPUs."""
    if any(group.kind != "GPU" for group in spec.instance_groups):
        raise InvalidArgumentError(
            f"unable to load model '{spec.name}', TensorRT backend supports only GPU device"
        )


def profile_index(text: str) -> int:
    """The number of a profile named in an instance group."""
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgumentError(f"unable to parse '{text}': {error}") from error


def instance_profiles(placement: Placement, count: int) -> tuple[int, ...]:
    """Numbers of the profiles of an instance, in order; profile 0 if its group names none."""
    indices = []
    for text in placement.profiles or ("0",):
        index = profile_index(text)
        if not 0 <= index < count:
            raise InvalidArgumentError(
                f"Can not set the specified optimization profile {text}[{index}] for {placement.name}. "
                f"Expected optimization profile index range 0-{count - 1}"
            )
        if index not in indices:
            indices.append(index)
    return tuple(indices)


def _graph_specs(spec: ModelSpec, cuda: Mapping[str, Any]) -> tuple[GraphSpec, ...]:
    if not cuda.get("graphs"):
        return ()
    most = spec.max_batch_size
    given = cuda.get("graph_spec") or ()
    if given:
        return tuple(_graph_spec(spec, entry) for entry in given)
    if not most:
        return (GraphSpec(0, {}, 0),)
    preferred = spec.batching.preferred_sizes if spec.batching is not None else ()
    sizes = {1, *preferred, most} if preferred else {*_USUAL_GRAPH_SIZES, most}
    return tuple(GraphSpec(size, {}, size) for size in sorted(sizes) if size <= most)


def _graph_spec(spec: ModelSpec, entry: Mapping[str, Any]) -> GraphSpec:
    size = _graph_batch_size(spec, entry, "graph spec")
    dims = _graph_dims(entry)
    bound = entry.get("graph_lower_bound")
    least = size
    if bound:
        least = _graph_batch_size(spec, bound, "graph lower bound spec")
        if least > size:
            raise InvalidArgumentError(
                f"graph lower bound spec of model '{spec.name}' has batch_size {least}, more than the "
                f"{size} of its graph spec"
            )
        lower = _graph_dims(bound)
        if any(dims.get(name) != each for name, each in lower.items()):
            raise UnsupportedError(
                f"graph lower bound spec of model '{spec.name}' has other dims than its graph spec: a graph "
                f"can run smaller batches, not smaller inputs; list a graph_spec for each shape"
            )
    names = {tensor.name for tensor in spec.model_inputs}
    unknown = next((name for name in dims if name not in names), None)
    if unknown is not None:
        raise InvalidArgumentError(
            f"graph spec of model '{spec.name}' has an unknown input '{unknown}', allowed inputs are: "
            f"{', '.join(sorted(names))}"
        )
    return GraphSpec(size, dims, least)


def _graph_batch_size(spec: ModelSpec, entry: Mapping[str, Any], what: str) -> int:
    size = int(entry.get("batch_size") or 0)
    most = spec.max_batch_size
    if most and not 1 <= size <= most:
        raise InvalidArgumentError(f"{what} expects 'batch_size' to be >= 1 and <= {most}")
    if not most and size:
        raise InvalidArgumentError(f"{what} expects 'batch_size' to be 0 as the model does not batch")
    return size


def _graph_dims(entry: Mapping[str, Any]) -> dict[str, Dims]:
    return {
        name: tuple(int(dim) for dim in shape.get("dim") or ())
        for name, shape in (entry.get("input") or {}).items()
    }
