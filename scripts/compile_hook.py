"""Compiles modules by mypyc while a wheel is built; `make wheels` turns this build hook on.

The modules are those that pyproject.toml lists for the hook. A wheel has the sources besides, for workers of
other Pythons. C code and libraries are made in a temporary folder, never in the work tree, where old
libraries would win over edited sources.
"""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GROUP = "conch.compiled"
"""One library of this name has the code of all modules; `conch.core.compiled` looks for it."""
SOURCES = ("services", "control")
# Packages are not installed where the wheel is built: what comes from them has no type, as in compiled code.
FLAGS = ["--config-file=", "--explicit-package-bases", "--follow-imports=silent", "--ignore-missing-imports"]


def files_of(names: list[str], source: Path) -> list[str]:
    """The files of modules, and of all modules of packages, as paths below the folder of sources.

    Raises:
        FileNotFoundError: There is no such module.
    """
    found = []
    for name in names:
        path = source / name.replace(".", "/")
        inside = sorted(each for each in path.rglob("*.py") if each.name != "__init__.py")
        if not inside and not path.with_suffix(".py").is_file():
            raise FileNotFoundError(f"pyproject.toml lists {name} as compiled, which is no module")
        found += [str(each.relative_to(source)) for each in inside or [path.with_suffix(".py")]]
    return found


def compile_modules(names: list[str], root: Path, folder: Path) -> list[Path]:
    """Compiles modules; returns the libraries, which lie in `folder` as in a wheel."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    os.environ["MYPYPATH"] = os.pathsep.join(str(root / each) for each in SOURCES)
    with chdir(root / SOURCES[0]):  # tracebacks have these paths, which Python looks for along its own
        extensions = mypycify(
            [*FLAGS, f"--cache-dir={folder / 'cache'}", *files_of(names, root / SOURCES[0])],
            opt_level=os.environ.get("MYPYC_OPT_LEVEL", "1"),  # 3 takes longer, and runs no faster
            debug_level="0",
            multi_file=True,
            target_dir=str(folder / "c"),
            group_name=GROUP,
        )
    for extension in extensions:  # where the header of a group with a dot in its name is
        extension.include_dirs.append(str(folder / "c" / GROUP.partition(".")[0]))
    command: Any = Distribution({"name": "conch", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "wheel"), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    return sorted((folder / "wheel").rglob("*.so"))


class CompileHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the libraries, and the Python and the platform to the wheel's name."""

    _folder: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, unless the wheel is for an editable install."""
        if version == "editable":
            return
        self._folder = TemporaryDirectory(prefix="conch-compiled-")
        folder = Path(self._folder.name)
        for library in compile_modules(self.config["modules"], Path(self.root), folder):
            build_data["force_include"][str(library)] = str(library.relative_to(folder / "wheel"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the folder, whose files are in the wheel."""
        if self._folder is not None:
            self._folder.cleanup()
