"""Model classes without `execute`, which add-ons may know how to run.

An entry point of the group ``conch.python_models`` names a function that takes such a class and returns one
with `execute`, or None for a class that it does not know. A worker's interpreter may have other packages than
the server's, so the server passes it the names of the functions and the places of their packages. It passes
the places of backends' packages, too, since a backend's own code may run its models in workers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from conch.backends import GROUP as BACKENDS
from conch.backends.python.runtime.tracebacks import hide_frames

GROUP = "conch.python_models"


class Adapters(TypedDict):
    """The functions, as ``module:name``, and paths of the top-level packages of functions and backends."""

    functions: list[str]
    packages: dict[str, str]


_given: Adapters | None = None


def use_adapters(adapters: Adapters) -> None:
    """Has a worker use the functions of its server."""
    global _given
    _given = adapters


@cache
def installed_adapters() -> Adapters:
    """The functions that entry points of this interpreter name; imports none of them."""
    from conch.core.add_ons import entry_points  # workers do without

    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    packages: dict[str, str] = {}
    for entry in (*found, *entry_points(group=BACKENDS)):
        top = entry.module.partition(".")[0]
        spec = find_spec(top)
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin)
            packages[top] = str(path.parent if path.name == "__init__.py" else path)
    return {"functions": [entry.value for entry in found], "packages": packages}


def adapted(model_class: type[Any]) -> type[Any] | None:
    """The class that runs a model class without `execute`; None if no add-on knows how.

    Raises:
        BaseException: An exception of an add-on.
    """
    for name in (_given or installed_adapters())["functions"]:
        path, _, function = name.partition(":")
        module = import_module(path)
        hide_frames(str(Path(module.__file__ or "").parent))
        found: type[Any] | None = getattr(module, function)(model_class)
        if found is not None:
            return found
    return None
