"""Modules of models under their plain names, for what looks them up in `sys.modules`, such as pickle.

An import statement of a model finds the model's own module by itself. `importlib.import_module`, unpickling
and imports by libraries go by `sys.modules`, which all models of a process share. So a module that is a
model's own has a stand-in there, which has the attributes of the module of whoever asks. Where it is not
known who asks, and several models have a module of that name, it has none: nobody gets another model's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_LOOKED_AT = ("__file__", "__warningregistry__")
"""What the standard library looks at in all modules there are; no module is imported for that."""

Find = Callable[[str, bool], ModuleType]
"""Gives the module with a plain name of whoever asks, having it imported or not."""


class UnknownError(Exception):
    """It is not known whose module a name stands for, or it is nobody's who asks."""


class NotOwnedError(UnknownError):
    """Whoever asks is known, and has no such module."""


class ModuleProxy(ModuleType):
    """What a plain name stands for where several models share it.

    Args:
        name: The name.
        find: Finds the modules, or raises `UnknownError`.
    """

    def __init__(self, name: str, find: Find) -> None:
        super().__init__(name)
        object.__setattr__(self, "_find", find)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return ModuleProxy
        plain = object.__getattribute__(self, "__name__")
        try:
            module = object.__getattribute__(self, "_find")(plain, name not in _LOOKED_AT)
        except UnknownError as error:
            if name == "__name__":
                return plain
            # The import system asks for this first, and would hand on a stand-in that is of no use.
            if name == "__spec__" and isinstance(error, NotOwnedError):
                raise ModuleNotFoundError(f"No module named {plain!r}", name=plain) from None
            # No other kind: those who look at all modules there are expect that some lack what they look for.
            raise AttributeError(str(error)) from None
        except Exception as error:
            if name == "__spec__":
                raise
            raise AttributeError(f"module '{plain}' can't be imported: {error}") from error
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, ModuleProxy):  # the import system's: the module itself has the submodule
            setattr(_module(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_module(self), name)

    def __dir__(self) -> list[str]:
        return dir(_module(self))

    def __repr__(self) -> str:
        plain = object.__getattribute__(self, "__name__")
        return f"<module {plain!r} of whichever model asks>"


def _module(stand_in: ModuleProxy) -> ModuleType:
    plain = object.__getattribute__(stand_in, "__name__")
    try:
        module: ModuleType = object.__getattribute__(stand_in, "_find")(plain, True)
    except UnknownError as error:
        raise AttributeError(str(error)) from None
    return module


def rename(names: dict[str, Any], old: str, new: str) -> None:
    """Has the classes and functions of a module say that it has another name, for those who pickle them."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == old:
            type.__setattr__(value, "__module__", new)  # whatever its own class has to say
            rename(dict(vars(value)), old, new)
        elif isinstance(value, FunctionType) and value.__module__ == old:
            value.__module__ = new
