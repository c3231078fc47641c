"""Loads a model's Python file, and the modules it imports from its directories, into a package of its own.

Triton gives each instance a process with the version and model directories on `sys.path`. Here instances
share a process, and two models may both have a ``helper.py``. Each load gets a package with a unique name:

- an import statement in its modules resolves names that only the model's directories have inside the package;
- other imports (`importlib`, unpickling) find a `ModuleProxy` under the plain name in `sys.modules`;
- pickles contain the plain names.

A worker process has one model: there the plain name is the module itself, and the directories are on
`sys.path`, which child processes inherit.

Owns: the loaded packages, plain names and model directories known to the import system; `_lock` guards them.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import itertools
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from conch.backends.python.runtime.module_proxies import ModuleProxy, NotOwnedError, UnknownError, rename
from conch.core.request import InferenceRequest

_PREFIX = "conch_model_"
_packages: dict[str, ModelCode] = {}
_plain_names: set[str] = set()
_directory_users: dict[str, int] = {}
_added_to_path: set[str] = set()
_single_model = False
_RESERVED = ("conch", "triton_python_backend_utils", "c_python_backend_utils")
_lock = threading.RLock()  # garbage collection inside may import
_numbers = itertools.count()


class Execution:
    """A coroutine execution of a model instance: the instance's owner object and the batch's requests."""

    __slots__ = ("owner", "requests")

    def __init__(self, owner: object, requests: list[InferenceRequest]) -> None:
        self.owner = owner
        self.requests = requests


current_execution: ContextVar[Execution | None] = ContextVar("conch_caller", default=None)
"""The execution that the running coroutine, or a task it started, belongs to."""


class ModelCode:
    """The modules of one load of a model.

    Attributes:
        module: The model's module.
        main: Name of that module inside the package.
        owner: Returned by `owner_of` for the modules: the instance's `CallContext`.

    Raises:
        FileNotFoundError: The file is missing.
        BaseException: An exception of the file.
    """

    def __init__(
        self, name: str, version_directory: Path, file_name: str, owner: object | None = None
    ) -> None:
        path = version_directory / file_name
        if not path.is_file():
            raise FileNotFoundError(path)
        self.version_directory = version_directory
        self.owner = owner
        # The file of a Python-based backend is in another directory, with its helpers.
        places = (path.parent, version_directory, version_directory.parent)
        self._directories = [str(place) for place in dict.fromkeys(places)]
        slug = re.sub(r"\W", "_", f"{name}_{version_directory.name}")
        self.package = f"{_PREFIX}{slug}_{next(_numbers)}"
        self._owned: dict[str, bool] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}
        with _lock:
            if _FINDER not in sys.meta_path:
                # First: the standard finder would find the same files.
                sys.meta_path.insert(0, _FINDER)
            _add_directories(self._directories, for_all=_single_model)
            _packages[self.package] = self
            # The importer's directory cache may predate a file written just before the load.
            _read_directories_again()
        with ExitStack() as undo:
            undo.callback(self.close)
            self.module = self._load(path)
            undo.pop_all()

    def close(self) -> None:
        """Unloads the modules, and the directories that no other load uses."""
        with _lock:
            if _packages.pop(self.package, None) is None:
                return
            inside = self.package + "."
            for name in list(sys.modules):  # a copy: other threads import concurrently
                if name == self.package or name.startswith(inside):
                    del sys.modules[name]
            _forget_plain_names()
            _remove_directories(self._directories)
            if not _packages and _FINDER in sys.meta_path:
                sys.meta_path.remove(_FINDER)

    def find(self, full_name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The spec of a module of the package."""
        spec = PathFinder.find_spec(full_name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(full_name, spec.loader.path, self)
        return spec

    def find_plain_spec(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The spec for a plain name of a module of the package."""
        if self.find(f"{self.package}.{name}", self._directories if path is None else path) is None:
            return None
        # Under another name: the import system removes a module from `sys.modules` for a moment after running
        # it, and another thread may look there.
        return ModuleSpec(f"{self.package}.{name}:plain", _PlainLoader(self, name))

    def publish_plain(self, name: str) -> bool:
        """Publishes a module in `sys.modules` under its plain name; False if another module has the name."""
        top, *inner = name.split(".")
        names = [top]
        for each in inner:
            names.append(f"{names[-1]}.{each}")
        if not self.owns(top):
            return False
        with _lock:
            if self.package not in _packages:
                return False
            for each in names:
                if each not in sys.modules:
                    module = sys.modules[f"{self.package}.{each}"]
                    sys.modules[each] = module if _single_model else ModuleProxy(each, _module_of_caller)
                    _plain_names.add(each)
            return name in _plain_names

    def _load(self, path: Path) -> ModuleType:
        package = ModuleType(self.package)
        package.__path__ = self._directories
        sys.modules[self.package] = package
        self.main = path.stem.replace(".", "_")
        name = f"{self.package}.{self.main}"
        spec = ModuleSpec(name, _Loader(name, str(path), self), origin=str(path))
        spec.has_location = True
        module = module_from_spec(spec)
        sys.modules[name] = module
        assert spec.loader is not None
        spec.loader.exec_module(module)
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """`__import__` of the model's modules."""
        if level == 0:
            top = name.partition(".")[0]
            if self.owns(top):
                module = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
                if name not in sys.modules:
                    self.publish_plain(name)  # unpickling imports and then looks in `sys.modules`
                return module if fromlist else sys.modules[f"{self.package}.{top}"]
            if isinstance(sys.modules.get(top), ModuleProxy):
                raise ModuleNotFoundError(f"No module named {top!r}", name=top)
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def owns(self, top: str) -> bool:
        """True if a top-level name is in the model's directories and not installed elsewhere."""
        owned = self._owned.get(top)
        if owned is None:
            found = PathFinder.find_spec(top, self._directories) is not None
            owned = found and not (top in sys.builtin_module_names or top in _RESERVED or _is_installed(top))
            if found or top in sys.modules:  # otherwise the file may still be written
                self._owned[top] = owned
        return owned


class _Loader(SourceFileLoader):
    """Executes a module with the model's `__import__`."""

    def __init__(self, full_name: str, path: str, code: ModelCode) -> None:
        super().__init__(full_name, path)
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._code.builtins
        name = self.name.removeprefix(f"{self._code.package}.")
        try:
            super().exec_module(module)
        except BaseException:  # raised again
            if name in _plain_names and sys.modules.get(name) is module:
                _plain_names.discard(name)
                del sys.modules[name]  # it had imported submodules
            raise
        # Not for the model's file: Triton has that in a package named after the version.
        if name != self._code.main and self._code.publish_plain(name):
            rename(vars(module), self.name, name)

    def set_data(self, path: str, data: Any, **_: Any) -> None:
        # Writes no byte code: the repository belongs to the user, and a change may trigger a reload.
        return


class _PlainLoader(Loader):
    """Imports a model's module and publishes it under its plain name."""

    def __init__(self, code: ModelCode, name: str) -> None:
        self._code = code
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module(f"{self._code.package}.{self._name}")
        self._code.publish_plain(self._name)
        # The import system returns this entry and drops the module created for the spec.
        sys.modules[module.__name__] = sys.modules[self._name]


class _Finder(MetaPathFinder):
    """Finds modules of loaded packages, and the calling model's modules by plain name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        code = _packages.get(top)
        if code is not None:
            return code.find(fullname, path)
        if path is not None and top not in _plain_names:
            return None
        try:
            return _owner_of_name(top).find_plain_spec(fullname, path)
        except UnknownError:
            return None


_FINDER = _Finder()


def set_single_model_process() -> None:
    """Declares that this process has one model: it gets the plain names and `sys.argv`."""
    global _single_model
    _single_model = True
    sys.argv = [""]


def directory_of(module_name: str) -> Path | None:
    """The version directory of a model's module; None for other modules."""
    code = _packages.get(module_name.partition(".")[0])
    return None if code is None else code.version_directory


def is_model_module(module_name: str) -> bool:
    """True for modules of models, loaded or unloaded."""
    return module_name.startswith(_PREFIX)


def owner_of(module_name: str) -> object | None:
    """The owner of a loaded model's module; None for other modules."""
    code = _packages.get(module_name.partition(".")[0])
    return None if code is None else code.owner


def owners() -> list[object]:
    """Owners of all loaded models."""
    with _lock:
        return [code.owner for code in _packages.values() if code.owner is not None]


def _owner_of_name(top: str) -> ModelCode:
    """The load that a top-level plain name refers to for the caller. Raises UnknownError: there is none."""
    # No lock: called from the import system under any lock.
    package = _calling_package()
    if package is not None:
        return _checked(_packages.get(package), top)
    execution = current_execution.get()
    if execution is not None:
        owner = execution.owner
        return _checked(next((code for code in [*_packages.values()] if code.owner is owner), None), top)
    known = [*_packages.values()]
    if len(known) == 1:
        return _checked(known[0], top)
    raise UnknownError(
        f"it is not known which of {len(known)} instances of models asks for '{top}': let a function in a "
        "module of the model ask, or run the model in a worker process"
    )


def _calling_package() -> str | None:
    """The package of the innermost model module on the stack; None without one."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if isinstance(module, str) and is_model_module(module):
            return module.partition(".")[0]
        frame = frame.f_back
    return None


def _checked(code: ModelCode | None, top: str) -> ModelCode:
    if code is None:
        raise NotOwnedError(f"'{top}' is asked for by a model that has been unloaded")
    if not code.owns(top):
        raise NotOwnedError(f"'{top}' is a module of other models, not of the one that asks")
    return code


def _module_of_caller(name: str, load: bool) -> ModuleType:
    """The caller's module behind a proxy. Raises UnknownError: there is none."""
    code = _owner_of_name(name.partition(".")[0])
    full_name = f"{code.package}.{name}"
    module = sys.modules.get(full_name)
    if load:
        try:
            module = importlib.import_module(full_name)  # waits for a thread that is importing it
        except ModuleNotFoundError as error:
            if error.name != full_name:
                raise
    if module is None:
        raise NotOwnedError(f"the model that asks has not imported '{name}', or has no such module")
    return module


def _forget_plain_names() -> None:
    """Removes plain names that no load has from the import system."""
    for name in list(_plain_names):
        if not any(f"{package}.{name}" in sys.modules for package in _packages):
            _plain_names.remove(name)
            sys.modules.pop(name, None)


def _add_directories(directories: Sequence[str], for_all: bool) -> None:
    """Counts a load's directories and, in a single-model process, adds them to `sys.path`."""
    for directory in directories:
        _directory_users[directory] = _directory_users.get(directory, 0) + 1
        if for_all and directory not in sys.path:
            sys.path.append(directory)
            _added_to_path.add(directory)


def _remove_directories(directories: Sequence[str]) -> None:
    """Forgets the directories that no other load uses."""
    for directory in directories:
        _directory_users[directory] -= 1
        if not _directory_users[directory]:
            del _directory_users[directory]
            _forget_directory(directory)


def _read_directories_again() -> None:
    """Has the import system read all directories again at their next use."""
    # `importlib.invalidate_caches` fails if a collection imports in its middle; `copy` makes one object.
    for finder in sys.path_importer_cache.copy().values():
        if isinstance(finder, FileFinder):
            finder.invalidate_caches()


def _is_installed(top: str) -> bool:
    """True if a name is importable without model directories and is more than a namespace package."""
    # Without the working directory: it says where the server was started, not what is installed.
    places = [entry for entry in sys.path if entry not in _directory_users and entry not in ("", ".")]
    spec = PathFinder.find_spec(top, places)
    return spec is not None and spec.origin is not None


def _forget_directory(directory: str) -> None:
    """Removes a directory, and modules imported from it by other means, from the import system."""
    if directory in _added_to_path:
        _added_to_path.remove(directory)
        if directory in sys.path:
            sys.path.remove(directory)
    sys.path_importer_cache.pop(directory, None)
    start = directory.rstrip("/") + "/"
    # `copy` makes one object, so that no collection, which may import, runs in its middle.
    for name, module in sys.modules.copy().items():
        if not isinstance(module, ModuleProxy) and (getattr(module, "__file__", None) or "").startswith(
            start
        ):
            del sys.modules[name]
