"""Settings of models for embeddings and scores from parameters of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError
from conch_engines.genai import engine_settings
from conch_engines.model_config import boolean, integer
from conch_llm.models import answer_parsers

PARAMETERS = ("pooling", "normalize")
_SHARED = ("device", "max_model_len", "num_threads")
_POOLINGS = ("cls", "mean", "last_token")


@dataclass(frozen=True, slots=True)
class VectorSettings:
    """Settings of one model.

    Attributes:
        device: OpenVINO's device.
        max_model_len: Most tokens of a text, or of a query and a document; 0 for the model's.
        num_threads: Threads of the engine; 0 for its own choice.
        pooling: Pooling of token vectors to a text's vector: ``cls``, ``mean`` or ``last_token``.
        normalize: True to scale embeddings to length 1.
    """

    device: str
    max_model_len: int
    num_threads: int
    pooling: str
    normalize: bool

    @classmethod
    def of(cls, parameters: Mapping[str, str], task: str) -> VectorSettings:
        """Reads parameters. Raises InvalidArgumentError: one is invalid or has no effect."""
        others = {*engine_settings.PARAMETERS, *answer_parsers.PARAMETERS}.difference(_SHARED)
        if task != "embed":
            others.update(PARAMETERS)
        for name in sorted(others.intersection(parameters)):
            raise InvalidArgumentError(f"parameter '{name}' has no effect for a model of the task '{task}'")
        device = parameters.get("device", "CPU")
        if not device.strip():
            raise InvalidArgumentError("parameter 'device' must name a device of OpenVINO, such as 'CPU'")
        pooling = parameters.get("pooling", "cls")
        if pooling not in _POOLINGS:
            raise InvalidArgumentError(
                f"parameter 'pooling' must be cls, mean or last_token, not '{pooling}'"
            )
        return cls(
            device=device,
            max_model_len=integer(parameters, "max_model_len", 0, 0),
            num_threads=integer(parameters, "num_threads", 0, 0),
            pooling=pooling,
            normalize=boolean(parameters, "normalize", True),
        )

    def properties(self) -> dict[str, int]:
        """Properties for OpenVINO."""
        return {"INFERENCE_NUM_THREADS": self.num_threads} if self.num_threads else {}
