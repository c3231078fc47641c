"""Compares outputs of responses with those that data files expect."""

from __future__ import annotations

import json
from collections.abc import Mapping

from conch.protocol import inference_pb2

DIFFERS = "Output doesn't match expected output"
SIZE_DIFFERS = "Output size doesn't match expected size"
"""As perf_analyzer says it."""


def grpc_difference(expected: Mapping[str, bytes], response: inference_pb2.ModelInferResponse) -> str:
    """The error of a response; empty if it has what is expected."""
    outputs = zip(response.outputs, response.raw_output_contents, strict=False)
    return _difference(expected, {output.name: raw for output, raw in outputs})


def http_difference(expected: Mapping[str, bytes], body: bytes, head_bytes: int) -> str:
    """The error of a response with binary outputs; empty if it has what is expected."""
    found = {}
    at = head_bytes
    for output in json.loads(body[:head_bytes])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        found[output["name"]] = body[at : at + size]
        at += size
    return _difference(expected, found)


def _difference(expected: Mapping[str, bytes], found: Mapping[str, bytes]) -> str:
    for name, data in expected.items():
        if len(found.get(name, b"")) != len(data):
            return SIZE_DIFFERS
        if found[name] != data:
            return DIFFERS
    return ""
