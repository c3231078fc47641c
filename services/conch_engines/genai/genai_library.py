"""The packages openvino and openvino_genai, imported without OpenVINO's telemetry."""

from __future__ import annotations

from conch_engines.openvino.openvino_engine import import_openvino

openvino = import_openvino()

import openvino_genai as genai  # noqa: E402 - imports openvino

__all__ = ["genai", "openvino"]
