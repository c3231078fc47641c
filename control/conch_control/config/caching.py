"""What a model's config says about the response cache besides that it wants one."""

from __future__ import annotations

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.problems import Checked, Problem, entry_path

_TTL = "CONCH_CACHE_TTL"
_NS_PER_S = 1_000_000_000
_MOST_S = 10**9


def checked_cache_ttl(config: ModelConfig) -> Checked[int]:
    """How long a model's cached responses are valid, in nanoseconds; 0 for as long as the cache says."""
    if _TTL not in config.parameters:
        return 0
    text = config.parameters[_TTL].string_value
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 / _NS_PER_S <= seconds <= _MOST_S:
        yield Problem(
            f"{entry_path('parameters', _TTL)}.string_value",
            f"parameter '{_TTL}' of model '{config.name}' must be a number of seconds above 0, got '{text}'",
            expected="a number of seconds above 0",
        )
        return 0
    return int(seconds * _NS_PER_S)
