"""Loads model directories as a server does, by the control plane's rules."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from conch.backends import load_backend
from conch.backends.python.python_settings import NeedsWorkerError
from conch.core.bls import Calls
from conch.core.errors import DeadlineExceededError, InvalidArgumentError
from conch.core.registry import Entry, Registry, VersionState
from conch.core.request import InferenceRequest
from conch.core.servable import Servable
from conch.workers.backend_directory import backends_within
from conch_testing.mock_models import Function, MockModel

Placement = Literal["in_process", "worker"]

GRACE_S = 3.0
"""Seconds that `Repository.close` waits for a model that still runs an abandoned request."""

_PLACEMENT = "CONCH_PLACEMENT"

log = logging.getLogger(__name__)


class Repository:
    """Models that can call each other.

    Args:
        placement: Process in which Python models run: ``in_process`` or ``worker``.
        backend_directory: Directory of backends that are not installed; None for Triton's.

    Attributes:
        given_up: Requests that the test abandoned at their deadline.
    """

    def __init__(self, placement: Placement, backend_directory: Path | None = None) -> None:
        self._placement = placement
        self._backend_directory = backend_directory
        self._registry = Registry()
        self._loaded: list[Servable] = []
        self.calls = Calls(self._registry)
        self.given_up: list[InferenceRequest] = []

    def add(self, name: str, model: Function | str | Path) -> None:
        """Adds a mock model: a function or a directory."""
        if callable(model):
            self._publish(name, MockModel(name, model))
        else:
            self.load(Path(model), name=name)

    def load(
        self,
        directory: Path,
        version: int | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Servable:
        """Loads one version of a model; by default the newest."""
        # The only place where the planes meet.
        from conch_control.config.json_format import to_json
        from conch_control.config.parse import read_config
        from conch_control.control_options import ControlOptions
        from conch_control.lifecycle.model_definition import read_definition
        from conch_control.lifecycle.model_loader import ModelLoader
        from conch_control.repository.layout import config_file

        directory = directory.resolve()
        if not directory.is_dir():
            raise FileNotFoundError(f"there is no model directory '{directory}'")
        name = directory.name if name is None else name
        options = ControlOptions(
            repositories=(directory.parent,),
            backend_options={"python": {"placement": self._placement}},
            backend_directory=self._backend_directory,
        )
        override = None
        if config:
            path = config_file(directory)
            written = to_json(read_config(path)) if path.is_file() else {}
            override = json.dumps({**written, **config})
        definition = read_definition(name, directory, options, override)
        if definition.config.parameters and _PLACEMENT in definition.config.parameters:
            definition.config.parameters[_PLACEMENT].string_value = self._placement
        if not definition.versions or (version is not None and version not in definition.versions):
            wanted = "no version" if version is None else f"no version {version}"
            raise FileNotFoundError(f"model directory '{directory}' has {wanted}")
        version = max(definition.versions) if version is None else version
        find = backends_within(
            self._backend_directory, load_backend, options.told, bool(options.devices.gpus)
        )
        loader = ModelLoader(options, find, self._registry, calls=self.calls)
        loader.check(definition)
        try:
            model = loader.load(replace(definition, versions=(version,)), version)
        except NeedsWorkerError as error:
            # The text must not advise a flag or config parameter: neither has effect here.
            raise InvalidArgumentError(
                f"{error.need}, and conch.testing runs it in this process by default: give "
                f"run or load placement='worker'"
            ) from None
        return self._publish(name, model)

    def close(self) -> None:
        """Closes all models in reverse order; waits briefly for those with abandoned requests."""
        self._loaded = [model for model in reversed(self._loaded) if not self._close(model)][::-1]

    @property
    def is_left(self) -> bool:
        """True if models are loaded, also after `close`, which may then be called again."""
        return bool(self._loaded)

    def _close(self, model: Servable) -> bool:
        late = [request for request in self.given_up if not request.completed]
        if model.close(GRACE_S if late else None):
            return True
        for request in late:
            # The model may never complete it, e.g. because it keeps the sender.
            request.fail(DeadlineExceededError("Deadline Exceeded"))
        if model.close(GRACE_S):
            return True
        log.warning(
            "model '%s' still runs a request whose deadline has passed: it is left, and not finalized",
            model.spec.name,
        )
        return False

    def _publish(self, name: str, model: Servable) -> Servable:
        self._loaded.append(model)
        version = model.spec.version
        self._registry.publish(name, Entry({version: model}, {version: VersionState("READY")}))
        return model
