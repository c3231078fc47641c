"""Loads a model's Python file, and everything it imports from its directories, under names of its own.

Triton gives each instance a process with the version directory, then the model directory, at the end of
`sys.path`, and loads the file as a module of a package that is the version directory. Here instances share
a process, and two models may each have a ``helper.py``. So every load gets a package with a unique name,
and within its modules an import of a name that only the model's directories have resolves inside that
package. The directories are at the end of `sys.path` as well, for imports that are made by other means.
"""

from __future__ import annotations

import builtins
import importlib
import itertools
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = "conch_model_"
_packages: dict[str, ModelCode] = {}
_path_users: dict[str, int] = {}
_path_added: set[str] = set()
_lock = threading.Lock()
_numbers = itertools.count()


class ModelCode:
    """The modules of one load of a model.

    Args:
        name: The model's name.
        version_directory: Where the model's file is.
        file_name: The name of the file.
        owner: On whose behalf the modules run; see `owner_of`.

    Attributes:
        version_directory: Where the model's file is.
        module: The model's module.
        owner: On whose behalf the modules run, or None.

    Raises:
        FileNotFoundError: There is no such file.
        BaseException: Whatever the file raises.
    """

    def __init__(
        self, name: str, version_directory: Path, file_name: str, owner: object | None = None
    ) -> None:
        path = version_directory / file_name
        if not path.is_file():
            raise FileNotFoundError(path)
        self.version_directory = version_directory
        self.owner = owner
        self._directories = [str(version_directory), str(version_directory.parent)]
        slug = re.sub(r"\W", "_", f"{name}_{version_directory.name}")
        self.package = f"{_PREFIX}{slug}_{next(_numbers)}"
        self._owned: dict[str, bool] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}
        with _lock:
            if _FINDER not in sys.meta_path:
                # First, for the standard finder would find the same files and load them without us.
                sys.meta_path.insert(0, _FINDER)
            for directory in self._directories:
                _path_users[directory] = _path_users.get(directory, 0) + 1
                if directory not in sys.path:
                    sys.path.append(directory)
                    _path_added.add(directory)
            _packages[self.package] = self
        # A file written just before the load may be newer than what the importer remembers of the folder.
        importlib.invalidate_caches()
        try:
            self.module = self._load(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forgets the modules, and the directories where no other load uses them."""
        with _lock:
            if _packages.pop(self.package, None) is None:
                return
            inside = self.package + "."
            for name in list(sys.modules):  # a copy: other threads import at the same time
                if name == self.package or name.startswith(inside):
                    del sys.modules[name]
            for directory in self._directories:
                _path_users[directory] -= 1
                if not _path_users[directory]:
                    del _path_users[directory]
                    _forget(directory)
            if not _packages and _FINDER in sys.meta_path:
                sys.meta_path.remove(_FINDER)

    def find(self, full_name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The spec of one of the package's modules."""
        spec = PathFinder.find_spec(full_name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(full_name, spec.loader.path, self.builtins)
        return spec

    def _load(self, path: Path) -> ModuleType:
        package = ModuleType(self.package)
        package.__path__ = self._directories
        sys.modules[self.package] = package
        name = f"{self.package}.{path.stem.replace('.', '_')}"
        spec = ModuleSpec(name, _Loader(name, str(path), self.builtins), origin=str(path))
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
        """What `import` statements of the model's modules call."""
        if level == 0:
            top = name.partition(".")[0]
            if self._owns(top):
                module = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
                return module if fromlist else sys.modules[f"{self.package}.{top}"]
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _owns(self, top: str) -> bool:
        """Whether a top-level name is the model's: in its directories, and nowhere before them."""
        owned = self._owned.get(top)
        if owned is None:
            owned = self._owned[top] = (
                top not in sys.builtin_module_names
                and PathFinder.find_spec(top, self._directories) is not None
                and not _installed(top)
            )
        return owned


class _Loader(SourceFileLoader):
    """Runs a module with a model's own `__import__`."""

    def __init__(self, full_name: str, path: str, names: dict[str, Any]) -> None:
        super().__init__(full_name, path)
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._names
        super().exec_module(module)

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        # No byte code is written: the repository is not ours, and a change in it may cause a reload.
        return


class _Finder(MetaPathFinder):
    """Finds modules inside the packages of loaded models."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        code = _packages.get(fullname.partition(".")[0])
        return None if code is None else code.find(fullname, path)


_FINDER = _Finder()


def directory_of(module_name: str) -> Path | None:
    """The version directory of the model a module belongs to; None if it is not a model's."""
    code = _packages.get(module_name.partition(".")[0])
    return None if code is None else code.version_directory


def is_model_module(module_name: str) -> bool:
    """Whether a module belongs to a model, one that is loaded or one that was."""
    return module_name.startswith(_PREFIX)


def owner_of(module_name: str) -> object | None:
    """On whose behalf a model's module runs; None if it is not a model's, or the model's no more."""
    code = _packages.get(module_name.partition(".")[0])
    return None if code is None else code.owner


def owners() -> list[object]:
    """On whose behalf the modules of all loaded models run."""
    with _lock:
        return [code.owner for code in _packages.values() if code.owner is not None]


def _installed(top: str) -> bool:
    """Whether a name is importable without the directories of any model, and not just a folder's name."""
    # The working directory is left out: it is where the server was started, not what it was installed with.
    places = [entry for entry in sys.path if entry not in _path_users and entry not in ("", ".")]
    spec = PathFinder.find_spec(top, places)
    return spec is not None and spec.origin is not None


def _forget(directory: str) -> None:
    """Takes a directory out of the import system, and modules that came from it by other means."""
    if directory in _path_added:
        _path_added.remove(directory)
        if directory in sys.path:
            sys.path.remove(directory)
    sys.path_importer_cache.pop(directory, None)
    start = directory.rstrip("/") + "/"
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(start):
            del sys.modules[name]
