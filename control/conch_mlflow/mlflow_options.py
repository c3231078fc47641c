"""Settings of MLflow registries. Imports little: `conch config` reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from conch.server_options import AddOnSettings, PartOptions
from conch.settings.option import FlagError, Settings, option
from conch.settings.value_types import BOOL
from conch_control.control_options import StorageOptions
from conch_mlflow.scoring.health_provider import HealthRoutes

NAME = "mlflow"
"""The name of the settings' entry point."""


@dataclass(frozen=True, slots=True)
class MlflowSettings(AddOnSettings):
    """MLflow registries, as the flags give them."""

    GROUP: ClassVar = "MLflow"
    AFTER: ClassVar = {"MLflow": "model repositories"}

    allow_code: bool = option(
        "--mlflow-allow-code",
        BOOL,
        False,
        "serve MLflow models that need their own Python code, and install their packages: those who may "
        "register models run code as the server's user",
    )

    def check(self, settings: Settings) -> None:
        """Checks that there is a registry. Raises FlagError: there is none."""
        if settings["mlflow-allow-code"] and not _has_registry(settings):
            raise FlagError("--mlflow-allow-code has no effect without a --model-repository=mlflow://...")

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Hands them to the kind of repository, and adds the probes to REST."""
        control = options.control
        kinds = {**control.storage.kinds, NAME: settings.build(MlflowSettings)}
        options = replace(options, control=replace(control, storage=replace(control.storage, kinds=kinds)))
        if options.http is None:
            return options
        return replace(options, http=replace(options.http, further=(*options.http.further, HealthRoutes())))


def _has_registry(settings: Settings) -> bool:
    locations = map(str, settings["model-repository"] or ())
    return any(each.startswith(("mlflow://", "mlflow+http://")) for each in locations)


def allows_code(options: StorageOptions) -> bool:
    """True if models may run code of their own."""
    found = options.kinds.get(NAME)
    return isinstance(found, MlflowSettings) and found.allow_code
