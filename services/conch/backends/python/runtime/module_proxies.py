"""Proxies in `sys.modules` under the plain names of models' modules.

An import statement of a model finds the model's own module. `importlib.import_module`, unpickling and library
imports use `sys.modules`, which all models in a process share. A proxy there forwards to the module of the
calling model. If the caller is unknown and several models have such a module, it forwards to none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_LOOKED_AT = ("__file__", "__warningregistry__")
"""Attributes that the standard library reads on every module; reading them imports nothing."""

Find = Callable[[str, bool], ModuleType]
"""Returns the calling model's module with a plain name; imports it if the flag is set."""


class UnknownError(Exception):
    """The owner of a name is unknown, or the caller is not a model."""


class NotOwnedError(UnknownError):
    """The caller is known and has no such module."""


class ModuleProxy(ModuleType):
    """Stands for a plain module name that several models share; `find` may raise `UnknownError`."""

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
            # The import system reads this first and would return a useless proxy.
            if name == "__spec__" and isinstance(error, NotOwnedError):
                raise ModuleNotFoundError(f"No module named {plain!r}", name=plain) from None
            # AttributeError, as code that scans all modules expects missing attributes.
            raise AttributeError(str(error)) from None
        except Exception as error:  # code of the model's modules
            if name == "__spec__":
                raise
            raise AttributeError(f"module '{plain}' can't be imported: {error}") from error
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        # The import system sets proxies of submodules, which the module itself has.
        if not isinstance(value, ModuleProxy):
            setattr(_module(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_module(self), name)

    def __dir__(self) -> list[str]:
        return dir(_module(self))

    def __repr__(self) -> str:
        plain = object.__getattribute__(self, "__name__")
        return f"<module {plain!r} of whichever model asks>"


def _module(proxy: ModuleProxy) -> ModuleType:
    plain = object.__getattribute__(proxy, "__name__")
    try:
        module: ModuleType = object.__getattribute__(proxy, "_find")(plain, True)
    except UnknownError as error:
        raise AttributeError(str(error)) from None
    return module


def rename(names: dict[str, Any], old: str, new: str) -> None:
    """Sets `__module__` of a module's classes and functions, so that pickles have the plain name."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == old:
            type.__setattr__(value, "__module__", new)  # bypasses the metaclass
            rename(dict(vars(value)), old, new)
        elif isinstance(value, FunctionType) and value.__module__ == old:
            value.__module__ = new
