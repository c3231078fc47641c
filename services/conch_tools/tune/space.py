"""The fields of a model's config that are searched, their values, and the config with a variant of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig

_MOST_INSTANCES = 8
_DELAYS_US = (0, 100, 500, 1000, 5000)
_PLACEMENT = "CONCH_PLACEMENT"
_THREADS = "intra_op_thread_count"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the config that is searched.

    Attributes:
        values: In order; a step of the search goes to the next one.
        reason: Why another value may serve better, for the diff.
    """

    values: tuple[Any, ...]
    reason: str


def make_space(
    config: ModelConfig, asked: Mapping[str, Sequence[Any]], rows: int = 1, cores: int = os.cpu_count() or 1
) -> dict[str, Field]:
    """The fields of a model that can be searched.

    Args:
        config: Today's, completed by the server.
        asked: Values that the user gives, by field; an empty list leaves the field as it is.
        rows: Of a request; no batch may be smaller.
        cores: Of the machine.

    Raises:
        InvalidArgumentError: The model has no such field, or nothing is left to search.
    """
    found: dict[str, Field] = {}
    groups = config.instance_group
    if not config.HasField("ensemble_scheduling") and len(groups) <= 1:
        counts = [each for each in (1, 2, 3, 4, 6, 8) if each <= min(2 * cores, _MOST_INSTANCES)]
        found["instances"] = Field(tuple(counts), "batches run at the same time")
    batched = config.max_batch_size > 1 and not config.HasField("sequence_batching")
    if batched and not config.HasField("ensemble_scheduling"):
        sizes = [0, *(1 << power for power in range(1, 8) if rows <= 1 << power <= config.max_batch_size)]
        if config.max_batch_size not in sizes:
            sizes.append(config.max_batch_size)
        found["batch"] = Field(tuple(sizes), "rows of a batch; larger requests are refused; 0: no batcher")
        found["delay_us"] = Field(_DELAYS_US, "how long the batcher waits for more rows")
    if config.backend == "python":
        found["placement"] = Field(
            ("in_process", "worker"), "threads of the server, or processes of their own"
        )
    if config.backend == "onnxruntime":
        threads = [each for each in (1, 2, 4, 8, 16) if each <= cores]
        found["threads"] = Field(tuple(threads), "threads of ONNX Runtime in each instance")
    unknown = [name for name in asked if name not in found]
    if unknown:
        raise InvalidArgumentError(
            f"--search {unknown[0]}: the model can be searched in {', '.join(found) or 'no field'}"
        )
    for name, values in asked.items():
        if values:
            found[name] = Field(tuple(values), found[name].reason)
        else:
            del found[name]
    for name, value in today_of(config, found).items():
        if value not in found[name].values:
            field = found[name]
            found[name] = Field(tuple(sorted((*field.values, value))), field.reason)
    found = {name: field for name, field in found.items() if len(field.values) > 1}
    if not found:
        raise InvalidArgumentError("there is nothing to search: every field has one value")
    return found


def today_of(config: ModelConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a config has today."""
    batching = config.dynamic_batching if config.HasField("dynamic_batching") else None
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    threads = parameters.get(_THREADS, "0")
    whole = {
        "instances": config.instance_group[0].count if config.instance_group else 1,
        "batch": 0 if batching is None else config.max_batch_size,
        "delay_us": 0 if batching is None else batching.max_queue_delay_microseconds,
        "placement": parameters.get(_PLACEMENT, "worker"),
        "threads": int(threads) if threads.isdecimal() else 0,
    }
    return {name: whole[name] for name in fields}


def apply_variant(config: ModelConfig, variant: Mapping[str, Any]) -> ModelConfig:
    """A config with other values; the rest stays as it is written."""
    made = ModelConfig()
    made.CopyFrom(config)
    if "instances" in variant:
        if not made.instance_group:
            made.instance_group.add()
        made.instance_group[0].count = variant["instances"]
    if "batch" in variant:
        if variant["batch"]:
            made.max_batch_size = variant["batch"]
            made.dynamic_batching.SetInParent()
            # They may be above the new size; the batcher fills batches without them.
            del made.dynamic_batching.preferred_batch_size[:]
        else:
            made.ClearField("dynamic_batching")
    if "delay_us" in variant and made.HasField("dynamic_batching"):
        made.dynamic_batching.max_queue_delay_microseconds = variant["delay_us"]
    if "placement" in variant:
        made.parameters[_PLACEMENT].string_value = variant["placement"]
    if variant.get("threads"):
        made.parameters[_THREADS].string_value = str(variant["threads"])
    return made
