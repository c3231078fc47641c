"""Bound functions and classes as a model repository in memory, next to repositories in directories.

Owns: what is bound; a lock guards them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from google.protobuf import text_format

from conch.core.errors import InternalError, InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig as ConfigMessage
from conch_api.bound_classes import BoundClass
from conch_api.decorators import Function
from conch_api.input_readers import InputReader
from conch_control.repository.source import ModelSource
from conch_control.repository.uploads import UploadedModel

FILE = "function"
"""The file in a version that holds the key of its functions."""


class BoundModel(UploadedModel):
    """Functions and their config; a `ModelSource`.

    Attributes:
        functions: One for each instance.
        readers: Readers of inputs by name, for functions that get them otherwise than they come.
        key: Content of their file.

    Args:
        config: The model's config.
        functions: One for each instance.
        version: The model's version.
        readers: Readers of inputs by name.
    """

    def __init__(
        self,
        config: ConfigMessage,
        functions: Sequence[Function],
        version: int,
        readers: Mapping[str, InputReader] | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self.readers = dict(readers or {})
        self.key = uuid4().hex
        text = text_format.MessageToString(config)
        super().__init__(config.name, {"config.pbtxt": text.encode(), f"{version}/{FILE}": self.key.encode()})

    @property
    def location(self) -> str:
        """Source of the model, for messages."""
        return "bound function"


class BoundRepository:
    """The functions bound to names; a `Repository`. Thread-safe.

    Attributes:
        announced: True: changes are announced, so it needs no polling.
    """

    self_managed = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, BoundModel | BoundClass] = {}
        # Includes replaced models while any of their versions is loaded.
        self._by_key: WeakValueDictionary[str, BoundModel] = WeakValueDictionary()

    @property
    def location(self) -> str:
        """Source of the models, for messages."""
        return "bound functions"

    @property
    def names(self) -> list[str]:
        """The bound names."""
        with self._lock:
            return sorted(self._models)

    def check(self) -> None:
        """Passes: bound functions are always accessible."""

    def models(self) -> Mapping[str, ModelSource]:
        """All bound models."""
        with self._lock:
            return dict(self._models)

    def close(self) -> None:
        """Keeps the functions, which may serve in the next server."""

    def put(self, model: BoundModel | BoundClass) -> BoundModel | BoundClass | None:
        """Binds functions or a class to a name; returns the former binding."""
        with self._lock:
            before = self._models.get(model.name)
            self._models[model.name] = model
            if isinstance(model, BoundModel):
                self._by_key[model.key] = model
            return before

    def restore(self, model: BoundModel | BoundClass, before: BoundModel | BoundClass | None) -> None:
        """Undoes `put`, unless the name has been bound again."""
        with self._lock:
            if self._models.get(model.name) is model:
                if before is None:
                    del self._models[model.name]
                else:
                    self._models[model.name] = before

    def remove(self, name: str) -> None:
        """Removes a name."""
        with self._lock:
            if self._models.pop(name, None) is None:
                raise InvalidArgumentError(f"no function is bound to '{name}'")

    def find(self, key: str) -> BoundModel:
        """The model with a key."""
        with self._lock:
            model: Any = self._by_key.get(key)
        if model is None:
            raise InternalError("the function of this model is not bound any more")
        return model  # type: ignore[no-any-return]
