"""Reads a model's config, its ``parameters`` and backend options, as Triton's backends read them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import place
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

_TRUE = frozenset({"true", "on", "1"})
_FALSE = frozenset({"false", "off", "0"})


def integer(parameters: Mapping[str, str], key: str, default: int, least: int | None = None) -> int:
    """A whole number."""
    text = parameters.get(key)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"parameter '{key}' must be a whole number: failed to convert '{text}' to integral number"
        ) from error
    if least is not None and value < least:
        raise InvalidArgumentError(f"parameter '{key}' must be at least {least}, got '{text}'")
    return value


def boolean(parameters: Mapping[str, str], key: str, default: bool) -> bool:
    """True or false: ``true``, ``on``, ``1``, ``false``, ``off`` or ``0`` in any case."""
    text = parameters.get(key)
    if text is None:
        return default
    lower = text.strip().lower()
    if lower in _TRUE:
        return True
    if lower in _FALSE:
        return False
    raise InvalidArgumentError(
        f"parameter '{key}' must be 'true' or 'false': failed to convert '{text}' to boolean"
    )


def threads_per_instance(spec: ModelSpec, on_cpu: bool = False) -> int:
    """Threads of an engine such that all CPU instances of the model together use each core once."""
    instances = sum(on_cpu or placement.kind != "GPU" for placement in place(spec.instance_groups))
    return max(len(os.sched_getaffinity(0)) // max(instances, 1), 1)


def lists_tensors(config: Mapping[str, Any]) -> bool:
    """True if a config has inputs and outputs; logs, as Triton does, that auto-complete is skipped then."""
    if not (config.get("input") and config.get("output")):
        return False
    log.info(
        "skipping model configuration auto-complete for '%s': inputs and outputs already specified",
        config.get("name", ""),
    )
    return True


def parameter_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The ``parameters`` of a config in JSON form."""
    parameters = config.get("parameters") or {}
    return {key: str(value.get("string_value", "")) for key, value in parameters.items()}


def child(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A message within a config in JSON form; empty where it is left out."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}
