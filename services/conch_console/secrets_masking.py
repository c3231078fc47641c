"""Hides values of configs whose keys look like those of secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from conch.protocol.model_config_pb2 import ModelConfig

HIDDEN: Final = "***"
_SECRET = r"(?:token|secret|passw|credential|api[-_]?key|access[-_]?key|private[-_]?key)"
_NAME: Final = re.compile(_SECRET, re.IGNORECASE)
_STRING: Final = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_STRINGS: Final = rf"({_STRING}(?:\s*{_STRING})*)"
_VALUE: Final = r"value\s*:?\s*(?:\{\s*string_value\s*)?:\s*"
_KEY: Final = rf"""key\s*:\s*["'][^"'\n]*{_SECRET}"""
# In either order, within one entry of a map.
_KEY_FIRST: Final = re.compile(rf"(\b{_KEY}[^{{}}]*?\b{_VALUE}){_STRINGS}", re.IGNORECASE)
_VALUE_FIRST: Final = re.compile(rf"(\b{_VALUE}){_STRINGS}(?=\s*\}}?[\s,;]*{_KEY})", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a key looks like that of a secret."""
    return _NAME.search(name) is not None


def masked_config(config: ModelConfig) -> ModelConfig:
    """A copy without the values of secret parameters."""
    copy = ModelConfig()
    copy.CopyFrom(config)
    for key in copy.parameters:
        if is_secret(key):
            copy.parameters[key].string_value = HIDDEN
    for parameters in _maps(copy):
        for key in parameters:
            if is_secret(key):
                parameters[key] = HIDDEN
    return copy


def masked_text(text: str) -> str:
    """The text of a config file without the values of secret parameters."""
    return _VALUE_FIRST.sub(_hidden, _KEY_FIRST.sub(_hidden, text))


def _hidden(found: re.Match[str]) -> str:
    return f'{found[1]}"{HIDDEN}"' + "\n" * found[2].count("\n")  # lines keep their numbers


def _maps(config: ModelConfig) -> Iterator[Any]:
    """The maps of texts in a config whose keys a user chooses."""
    for agent in config.model_repository_agents.agents:
        yield agent.parameters
    accelerators = config.optimization.execution_accelerators
    for each in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield each.parameters
