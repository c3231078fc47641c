"""Where each value of an effective config comes from."""

from __future__ import annotations

from collections.abc import Mapping

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.normalize import normalize
from conch_control.config.schema import leaves

CONFIG_FILE = "config.pbtxt"
"""The value stands in the model's config file."""

OVERRIDE = "override"
"""The value stands in the config of a load request."""

MODEL = "model"
"""The value was found out from the model's files, most of it by the backend."""

DEFAULT = "default"
"""Nobody gave the value."""


def config_origins(
    written: ModelConfig, completed: ModelConfig, normalised: ModelConfig, source: str = CONFIG_FILE
) -> Mapping[str, str]:
    """Where each value of a config comes from.

    Args:
        written: The config as it was written.
        completed: The same as the backend has completed it. Defaults may be in it already.
        normalised: The config in force.
        source: Origin of what was written: `CONFIG_FILE` or `OVERRIDE`.

    Returns:
        `source`, `MODEL` or `DEFAULT` by path of every value in force, in the order of the schema. Repeated
        fields of plain values have one path for all of them, such as ``input[0].dims``, and so have messages
        in which nothing is set, such as ``dynamic_batching``.
    """
    defaults = ModelConfig()
    defaults.CopyFrom(written)
    defaults.name = normalised.name  # that of the directory, if nobody gave one
    normalize(defaults)
    known = [
        ({path: value for path, _, value in leaves(config)}, origin)
        for config, origin in ((written, source), (defaults, DEFAULT), (completed, MODEL))
    ]
    return {
        path: next((origin for values, origin in known if path in values and values[path] == value), DEFAULT)
        for path, _, value in leaves(normalised)
    }
