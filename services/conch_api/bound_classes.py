"""Classes of a program as Python models that run in its process.

The repository has a `model.py` that looks the class up, so that all else is as with any Python model.

Owns: the classes by key, as long as a server or a loaded model has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from google.protobuf import text_format

from conch.protocol.model_config_pb2 import ModelConfig as ConfigMessage
from conch_control.repository.uploads import UploadedModel

_classes: WeakValueDictionary[str, type[Any]] = WeakValueDictionary()
_FILE = """\
from conch_api.bound_classes import class_with

TritonPythonModel = class_with("{key}")
"""


class BoundClass(UploadedModel):
    """A class as a model; a `ModelSource`.

    Args:
        name: The model's name.
        model_class: The class.
    """

    def __init__(self, name: str, model_class: type[Any]) -> None:
        self._model_class = model_class  # keeps the key alive
        key = uuid4().hex
        _classes[key] = model_class
        config = ConfigMessage(name=name, backend="python")
        config.parameters["CONCH_PLACEMENT"].string_value = "in_process"
        text = text_format.MessageToString(config)
        super().__init__(name, {"config.pbtxt": text.encode(), "1/model.py": _FILE.format(key=key).encode()})

    @property
    def location(self) -> str:
        """Source of the model, for messages."""
        return "bound class"


def class_with(key: str) -> type[Any]:
    """The class with a key."""
    return _classes[key]


def chat_class(function: Callable[..., Any]) -> type[Any]:
    """A class whose `chat` is a function."""
    return type("TritonPythonModel", (), {"chat": staticmethod(function), "__module__": function.__module__})
