"""The space of a search: the fields of a model's config with their values, and the config of a variant."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_tools.tune.fields import FIELDS, Field

_BY_NAME = {field.name: field for field in FIELDS}
_OF_THE_BATCHER = ("delay_us", "preferred")


@dataclass(frozen=True, slots=True)
class Space:
    """Space of variants that is searched.

    Attributes:
        values: By field; today's are among them.
        config_today: Today's value of each field that the model has, searched or not.
    """

    values: Mapping[str, tuple[Any, ...]]
    config_today: Mapping[str, Any]

    @property
    def today(self) -> dict[str, Any]:
        """Today's variant."""
        return {name: self.config_today[name] for name in self.values}

    def effective(self, variant: Mapping[str, Any]) -> dict[str, Any]:
        """The variant that stands for all those with the same effect.

        Without a batcher, for example, its delay has none.
        """
        others = {**self.config_today, **variant}
        found = {name: _BY_NAME[name].effective(value, others) for name, value in variant.items()}
        return {name: found[name] if found[name] in self.values[name] else variant[name] for name in found}

    def read(self, config: ModelConfig) -> dict[str, Any]:
        """The values that a config has; equal for configs with the same effect."""
        found = _read(config, self.config_today)
        return {name: found[name] for name in self.values}


def make_space(
    config: ModelConfig,
    asked: Mapping[str, Sequence[str]],
    rows: int = 1,
    cores: int = os.cpu_count() or 1,
    batcher_can_go: bool = True,
) -> Space:
    """The fields of a model that are searched.

    Args:
        config: Today's config, completed by the server.
        asked: Values that the user gives, by field; an empty list leaves the field as it is.
        rows: Rows of a request; no batch may be smaller.
        cores: Cores of the machine.
        batcher_can_go: True if a config without a batcher is served without one.

    Raises:
        InvalidArgumentError: The model has no such field, or nothing is left to search.
    """
    possible = {field.name: field for field in FIELDS if field.values(config, rows, cores)}
    unknown = [name for name in asked if name not in possible]
    if unknown:
        raise InvalidArgumentError(
            f"--search {unknown[0]}: the model can be searched in {', '.join(possible) or 'no field'}"
        )
    today = _read(config, possible)
    found: dict[str, tuple[Any, ...]] = {}
    for name, field in possible.items():
        if name in asked:
            values = _parsed(field, asked[name])
        else:
            values = field.values(config, rows, cores) if field.searched else ()
            if name == "batch" and not batcher_can_go:
                values = tuple(each for each in values if each)
        if values and today[name] not in values:
            values = _with_today(values, today[name])
        if len(values) > 1:
            found[name] = values
    if not any(found.get("batch", (today.get("batch", 0),))):
        for name in _OF_THE_BATCHER:
            if asked.get(name):
                raise InvalidArgumentError(f"--search {name} has no effect: the model has no dynamic batcher")
            found.pop(name, None)
    if "batch" in asked and "0" in asked["batch"] and not batcher_can_go:
        raise InvalidArgumentError(
            "--search batch=0: the server completes the model's config with a dynamic batcher"
        )
    if not found:
        raise InvalidArgumentError("there is nothing to search: every field has one value")
    return Space(found, today)


def apply_variant(config: ModelConfig, variant: Mapping[str, Any]) -> ModelConfig:
    """A config with other values; the rest stays as it is written.

    A batcher whose fields have other values is written, too: the server may have completed it.
    """
    made = ModelConfig()
    made.CopyFrom(config)
    for field in FIELDS:
        without = field.name in _OF_THE_BATCHER and variant.get("batch") == 0
        if field.name in variant and not without:
            field.apply(made, variant[field.name])
    return made


def reason_of(name: str) -> str:
    """Reason for which another value of a field may serve better."""
    return _BY_NAME[name].reason


def _read(config: ModelConfig, names: Iterable[str]) -> dict[str, Any]:
    found = {name: _BY_NAME[name].today(config) for name in names}
    return {name: _BY_NAME[name].effective(value, found) for name, value in found.items()}


def _parsed(field: Field, texts: Sequence[str]) -> tuple[Any, ...]:
    found = []
    for text in texts:
        try:
            found.append(field.parse(text))
        except ValueError:
            raise InvalidArgumentError(
                f"--search {field.name}: a value is {field.form}, not '{text}'"
            ) from None
    values = tuple(dict.fromkeys(found))
    return tuple(sorted(values)) if all(isinstance(value, int) for value in values) else values


def _with_today(values: tuple[Any, ...], today: Any) -> tuple[Any, ...]:
    both = (*values, today)
    return tuple(sorted(both)) if isinstance(today, int) else both
