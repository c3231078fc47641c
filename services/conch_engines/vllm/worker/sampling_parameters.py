"""Sampling parameters of a request, converted to the types that vLLM's ``SamplingParams`` annotates."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

LORA = "lora_name"
_STRUCTURED = "structured_outputs"
_RESERVED = ("triton_", "conch_")


class ParameterError(ValueError):
    """A parameter of a request is invalid; the text names it."""


def sampling_parameters(
    given: Mapping[str, Any], defaults: Mapping[str, Any], stream: bool, strict: bool
) -> tuple[Any, str]:
    """Parameters for vLLM, and the name of the LoRA adapter or an empty string.

    Args:
        given: Parameters of the request.
        defaults: Parameters of the model.
        stream: True if the request wants deltas rather than one output.
        strict: True if all names must be known; others may belong to a front end.

    Raises:
        ParameterError: A parameter is unknown or has a wrong value.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kinds = _kinds(SamplingParams)
    values: dict[str, Any] = {key: value for key, value in defaults.items() if key in kinds}
    adapter = ""
    for name, value in given.items():
        if name == LORA:
            adapter = "" if value is None else str(value)
        elif name == _STRUCTURED:
            values[name] = _structured(value)
        elif name in kinds:
            values[name] = _converted(name, value, kinds[name])
        elif strict or _is_ours(name):
            close = difflib.get_close_matches(name, kinds)
            hint = f"; close are: {', '.join(close)}" if close else ""
            raise ParameterError(f"'{name}' is no sampling parameter{hint}")
    values["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    try:
        return SamplingParams(**values), adapter
    except (TypeError, ValueError) as error:
        raise ParameterError(f"sampling parameters are invalid: {error}") from error


def _is_ours(name: str) -> bool:
    """False for parameters of protocols, and for headers, which have dashes."""
    return name.isidentifier() and not name.startswith(_RESERVED)


def _kinds(params: Any) -> dict[str, frozenset[str]]:
    """Names of the types of each parameter; those that vLLM sets itself are left out."""
    found: dict[str, Any] = {}
    for each in reversed(params.__mro__):
        found.update(inspect.get_annotations(each))
    return {
        name: frozenset(re.findall(r"[A-Za-z_]\w*", kind if isinstance(kind, str) else _text(kind)))
        - {"None"}
        for name, kind in found.items()
        if not name.startswith("_") and name != "output_kind"
    }


def _text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", ()) else str(kind)


def _converted(name: str, value: Any, kinds: frozenset[str]) -> Any:
    if value is None:
        return None
    try:
        if kinds == {"bool"}:
            return _boolean(value)
        if kinds == {"int"}:
            return _whole(value)
        if kinds == {"float"}:
            return _number(value)
        if kinds == {"str"}:
            return str(value)
        if isinstance(value, str) and "str" not in kinds:
            value = json.loads(value)  # request parameters have no lists
        if name == "logit_bias":
            return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        wanted = "JSON" if len(kinds) > 1 else next(iter(kinds))
        raise ParameterError(
            f"sampling parameter '{name}' must be of type {wanted}, not {json.dumps(value)}"
        ) from None
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1):
        return bool(value)
    raise ValueError


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _structured(value: Any) -> Any:
    if value is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    try:
        found = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, dict):
            raise ParameterError(f"'{_STRUCTURED}' must be a JSON object")
        return StructuredOutputsParams(**found)
    except ParameterError:
        raise
    except (TypeError, ValueError) as error:
        raise ParameterError(f"'{_STRUCTURED}' is invalid: {error}") from error
