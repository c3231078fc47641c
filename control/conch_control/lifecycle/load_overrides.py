"""Overrides in load requests: a config and files in place of the repository's.

Front ends pass the parameters as received, with file contents decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from conch.core.errors import InvalidArgumentError
from conch.core.model_control import LoadParameter
from conch_control.config.parse import check_config_size
from conch_control.control_options import MOST_CONFIG_BYTES
from conch_control.repository.source import Scan
from conch_control.repository.uploads import FILE_PREFIX, UploadedModel, normalized_files

CONFIG = "config"
"""Name of the parameter with the config."""

PIN = "conch_pin"
"""Name of the parameter that tells, in on-demand mode, whether the model stays until it is unloaded."""

_TYPES = {bool: "BOOL", int: "INT", str: "STRING", bytes: "BYTES"}


@dataclass(frozen=True, slots=True)
class Overrides:
    """The overrides of a load request: a config in JSON, and contents by path as the client wrote it.

    Attributes:
        pin: True if the model stays in memory until it is unloaded.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    pin: bool = True


def read_overrides(
    parameters: Mapping[str, LoadParameter], most_config_bytes: int = MOST_CONFIG_BYTES
) -> Overrides:
    """Parses load parameters. Raises InvalidArgumentError: one is unknown, too large or of the wrong type."""
    config: str | None = None
    files: dict[str, bytes] = {}
    pin = True
    for key, value in parameters.items():
        if key == CONFIG:
            if not isinstance(value, str):
                raise InvalidArgumentError("Config parameter 'config' must have string type for its value")
            size = len(value.encode(errors="surrogatepass"))
            check_config_size(size, most_config_bytes, "Load parameter 'config'")
            config = value
        elif key.startswith(FILE_PREFIX):
            if not isinstance(value, bytes):
                raise InvalidArgumentError(f"File parameter '{key}' must have bytes type for its value")
            files[key.removeprefix(FILE_PREFIX)] = value
        elif key == PIN:
            if not isinstance(value, bool):
                raise InvalidArgumentError(f"Load parameter '{PIN}' must have bool type for its value")
            pin = value
        else:
            kind = _TYPES[type(value)]
            raise InvalidArgumentError(f"Unrecognized load parameter '{key}' with type '{kind}'")
    if not pin and (config is not None or files):
        raise InvalidArgumentError(
            f"Load parameter '{PIN}' can't be false with a config or files: an eviction would lose them"
        )
    return Overrides(config, files, pin)


def apply_overrides(name: str, overrides: Overrides, scan: Scan) -> Scan:
    """The scan with the uploaded files in place of the model.

    Raises:
        InvalidArgumentError: The files do not form a model.
    """
    if not overrides.files:
        return scan
    if overrides.config is None:
        raise InvalidArgumentError("Load parameter 'config' must be specified for model file override")
    if not name.isprintable():
        raise InvalidArgumentError(f"model name {name!r} is not text")
    models = {**scan.models, name: UploadedModel(name, normalized_files(overrides.files))}
    remembered = {other: source for other, source in scan.remembered.items() if other != name}
    return replace(scan, models=models, duplicates=scan.duplicates - {name}, remembered=remembered)
