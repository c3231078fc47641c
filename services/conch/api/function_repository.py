"""Functions as a repository: models that are in memory, beside those in directories."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from google.protobuf import text_format

from conch.api.decorators import Function
from conch.core.errors import InternalError, InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig as ConfigMessage
from conch_control.lifecycle.load_overrides import UploadedModel
from conch_control.repository.source import ModelSource

FILE = "function"
"""The file of a version that says which functions are meant."""


class BoundModel(UploadedModel):
    """Functions and the config that they are served by; a `ModelSource`.

    Attributes:
        functions: One for each instance.
        key: What their file says.

    Args:
        config: The model's config.
        functions: One for each instance.
        version: The model's version.
    """

    def __init__(self, config: ConfigMessage, functions: Sequence[Function], version: int) -> None:
        self.functions = tuple(functions)
        self.key = uuid4().hex
        text = text_format.MessageToString(config)
        super().__init__(config.name, {"config.pbtxt": text.encode(), f"{version}/{FILE}": self.key.encode()})

    @property
    def location(self) -> str:
        """Words that say where it comes from."""
        return "bound function"


class BoundRepository:
    """The functions that are bound to names; a `Repository`. Any thread may use it.

    Attributes:
        self_managed: The server loads its changes itself.
    """

    self_managed = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, BoundModel] = {}
        # Also those that have been replaced, as long as anything of them is loaded.
        self._by_key: WeakValueDictionary[str, BoundModel] = WeakValueDictionary()

    @property
    def location(self) -> str:
        """Words that say where the models are."""
        return "bound functions"

    @property
    def names(self) -> list[str]:
        """The names that have functions."""
        with self._lock:
            return sorted(self._models)

    def check(self) -> None:
        """Does nothing: it can always be used."""

    def models(self) -> Mapping[str, ModelSource]:
        """The models there are."""
        with self._lock:
            return dict(self._models)

    def close(self) -> None:
        """Does nothing: what is bound may be bound in the next server."""

    def put(self, model: BoundModel) -> BoundModel | None:
        """Binds functions to a name; returns what it had before."""
        with self._lock:
            before = self._models.get(model.name)
            self._models[model.name] = model
            self._by_key[model.key] = model
            return before

    def restore(self, model: BoundModel, before: BoundModel | None) -> None:
        """Takes `put` back, unless the name has been bound again since."""
        with self._lock:
            if self._models.get(model.name) is model:
                if before is None:
                    del self._models[model.name]
                else:
                    self._models[model.name] = before

    def remove(self, name: str) -> None:
        """Forgets a name.

        Raises:
            InvalidArgumentError: It has no function.
        """
        with self._lock:
            if self._models.pop(name, None) is None:
                raise InvalidArgumentError(f"no function is bound to '{name}'")

    def find(self, key: str) -> BoundModel:
        """The model of a key.

        Raises:
            InternalError: There is none: the directory is not one that came from here.
        """
        with self._lock:
            model: Any = self._by_key.get(key)
        if model is None:
            raise InternalError("the function of this model is not bound any more")
        return model  # type: ignore[no-any-return]
