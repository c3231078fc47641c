"""Parameters of OpenVINO models as properties of a compiled model; names and texts are Triton's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import place
from conch.core.spec import ModelSpec

PROPERTY_PREFIX = "CONCH_OV_"
"""Prefix of model parameters that set the OpenVINO property of the rest of their name."""

CACHE_DIR = "CACHE_DIR"
"""Model parameter and backend option: folder of compiled models."""

_HINTS = ("latency", "throughput", "cumulative_throughput")
_SPECIAL_STREAMS = {"auto": "-1", "numa": "-2"}
_CHOOSERS = frozenset({"AUTO", "HETERO", "MULTI"})

PARAMETERS = (
    PROPERTY_PREFIX,
    CACHE_DIR,
    "PERFORMANCE_HINT",
    "INFERENCE_NUM_THREADS",
    "COMPILATION_NUM_THREADS",
    "HINT_BF16",
    "INFERENCE_PRECISION_HINT",
    "NUM_STREAMS",
    "CPU_EXTENSION_PATH",
    "TARGET_DEVICE",
    "RESHAPE_IO_LAYERS",
    # Batches of any size run anyway.
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "ENABLE_BATCH_PADDING",
)


@dataclass(frozen=True, slots=True)
class OpenVinoSettings:
    """Settings of one model version.

    Attributes:
        device: OpenVINO's name of the device.
        properties: Properties of the compiled model.
        extension: Path of a library with operations for the CPU; empty for none.
        reshapes: True if the config's dims replace those of the model's inputs.
    """

    device: str
    properties: Mapping[str, str]
    extension: str
    reshapes: bool

    @property
    def on_cpu(self) -> bool:
        """True if the model runs on the CPU alone."""
        return set(re.split("[:,]", self.device)) - _CHOOSERS == {"CPU"}

    @classmethod
    def of(cls, spec: ModelSpec) -> OpenVinoSettings:
        """Reads a config."""
        parameters = spec.parameters
        device = parameters.get("TARGET_DEVICE", "").strip().upper() or "CPU"
        settings = cls(
            device,
            properties := _properties(parameters),
            parameters.get("CPU_EXTENSION_PATH", ""),
            parameters.get("RESHAPE_IO_LAYERS", "").lower() == "yes",
        )
        cache = spec.backend_options.get(CACHE_DIR, "")
        if cache:
            properties.setdefault(CACHE_DIR, cache)
        if settings.on_cpu:
            # On newer processors OpenVINO would compute in bf16 unasked, with three digits.
            properties.setdefault("INFERENCE_PRECISION_HINT", "f32")
        if device == "CPU":
            properties.setdefault("INFERENCE_NUM_THREADS", str(len(os.sched_getaffinity(0))))
            # Models share the cores, and pinned threads of two models would share one.
            properties.setdefault("ENABLE_CPU_PINNING", "NO")
            if "PERFORMANCE_HINT" not in properties:  # else it chooses
                properties.setdefault("NUM_STREAMS", str(len(place(spec.instance_groups))))
        for key, value in parameters.items():
            if key.startswith(PROPERTY_PREFIX):
                properties[key.removeprefix(PROPERTY_PREFIX)] = value
        return settings


def _properties(parameters: Mapping[str, str]) -> dict[str, str]:
    """Properties that the parameters name."""
    properties: dict[str, str] = {}
    hint = _value(parameters, "PERFORMANCE_HINT")
    if hint:
        if hint not in _HINTS:
            raise _invalid("PERFORMANCE_HINT", "LATENCY/THROUGHPUT/CUMULATIVE_THROUGHPUT", hint)
        properties["PERFORMANCE_HINT"] = hint.upper()
    for key in ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS"):
        number = _value(parameters, key)
        if number:
            if not _is_number(number):
                raise _invalid(key, "a non-negative number", number)
            properties[key] = number
    streams = _value(parameters, "NUM_STREAMS")
    if streams:
        if streams not in _SPECIAL_STREAMS and not _is_number(streams):
            raise _invalid("NUM_STREAMS", "either AUTO/NUMA/<int_value>", streams)
        properties["NUM_STREAMS"] = _SPECIAL_STREAMS.get(streams, streams)
    precision = _value(parameters, "INFERENCE_PRECISION_HINT")
    bf16 = _value(parameters, "HINT_BF16")
    if bf16 and bf16 != "yes":
        raise _invalid("HINT_BF16", "YES", bf16)
    if bf16 and precision not in ("", "bf16"):
        raise InvalidArgumentError(
            f"parameter 'HINT_BF16' asks for bf16 and 'INFERENCE_PRECISION_HINT' for {precision}; leave one "
            f"of them out"
        )
    if precision or bf16:
        properties["INFERENCE_PRECISION_HINT"] = precision or "bf16"
    cache = parameters.get(CACHE_DIR, "")
    if cache:
        properties[CACHE_DIR] = cache
    return properties


def _value(parameters: Mapping[str, str], key: str) -> str:
    return parameters.get(key, "").lower()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _invalid(key: str, expected: str, value: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"expected the parameter '{key}' to be {expected}, got {value}")
