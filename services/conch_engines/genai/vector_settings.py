"""Settings of models for embeddings and scores from parameters of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_engines.genai import engine_settings
from conch_engines.genai.model_on_disk import EMBED
from conch_engines.language.json_files import read_json
from conch_engines.model_config import boolean, integer
from conch_llm.models import answer_parsers

PARAMETERS = ("pooling", "normalize")
_SHARED = ("device", "max_model_len", "num_threads")
_POOLINGS = ("cls", "mean", "last_token")
_MODULES = "modules.json"
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last_token"}
"""Poolings by their names in ``1_Pooling/config.json``."""
_MODE = "pooling_mode"


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
    def of(cls, parameters: Mapping[str, str], task: str, directory: Path) -> VectorSettings:
        """Reads parameters, and for embeddings what the model's folder says.

        Raises:
            InvalidArgumentError: One is invalid or has no effect, or none says which pooling the model has.
        """
        others = {*engine_settings.PARAMETERS, *answer_parsers.PARAMETERS}.difference(_SHARED)
        if task != EMBED:
            others.update(PARAMETERS)
        for name in sorted(others.intersection(parameters)):
            raise InvalidArgumentError(f"parameter '{name}' has no effect for a model of the task '{task}'")
        device = parameters.get("device", "CPU")
        if not device.strip():
            raise InvalidArgumentError("parameter 'device' must name a device of OpenVINO, such as 'CPU'")
        pooling, normalize = parameters.get("pooling", ""), True
        if "pooling" in parameters and pooling not in _POOLINGS:
            raise InvalidArgumentError(
                f"parameter 'pooling' must be cls, mean or last_token, not '{pooling}'"
            )
        if task == EMBED:
            place, normalize = _modules(directory)
            pooling = pooling or _pooling(place / "config.json")
        return cls(
            device=device,
            max_model_len=integer(parameters, "max_model_len", 0, 0),
            num_threads=integer(parameters, "num_threads", 0, 0),
            pooling=pooling,
            normalize=boolean(parameters, "normalize", normalize),
        )

    def properties(self) -> dict[str, int]:
        """Properties for OpenVINO."""
        return {"INFERENCE_NUM_THREADS": self.num_threads} if self.num_threads else {}


def _modules(directory: Path) -> tuple[Path, bool]:
    """The place of the pooling's settings, and whether vectors have length 1, by ``modules.json``."""
    path, place, normalize = directory / _MODULES, directory / "1_Pooling", False
    modules = read_json(path, list)
    for each in modules:
        module = each if isinstance(each, dict) else {}
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            place = directory / Path(str(module.get("path"))).name
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise InvalidArgumentError(f"'{path}' has {kind}, which the engine does not apply")
    return place, normalize or not modules


def _pooling(path: Path) -> str:
    """The pooling that a file names."""
    config = read_json(path, dict)
    written = config.get(_MODE)
    modes = [written] if isinstance(written, str) else written
    if not isinstance(modes, list):
        modes = [name for name in config if name.startswith(_MODE) and config[name]]
        modes = [name.removeprefix(f"{_MODE}_").partition("_token")[0] for name in modes]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    asks = f"asks for {' and '.join(map(str, modes))}" if modes else "does not say how tokens make a vector"
    raise InvalidArgumentError(f"'{path}' {asks}: set parameter 'pooling' to cls, mean or last_token")
