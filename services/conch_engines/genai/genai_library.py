"""The packages openvino and openvino_genai, imported without OpenVINO's telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conch.core.engine_text import engine_text
from conch.core.errors import InvalidArgumentError
from conch_engines.openvino.openvino_engine import import_openvino

openvino = import_openvino()

import openvino_genai as genai  # noqa: E402 - imports openvino

__all__ = ["genai", "opened", "openvino"]


@contextmanager
def opened(path: Path) -> Iterator[None]:
    """Opens a model in the block. Raises InvalidArgumentError: the engine can't read it."""
    try:
        yield
    except RuntimeError as error:
        raise InvalidArgumentError(f"the engine can't open '{path}': {engine_text(error)}") from None
