"""Compiles the C host while a wheel is built."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-Wl,-soname,libtritonserver.so,-z,now",
]


def compiler() -> list[str]:
    """The command of the C compiler: ``$CC``, ``cc``, or ziglang's; empty if there is none."""
    given = os.environ.get("CC")
    if given:
        return shlex.split(given)
    if shutil.which("cc"):
        return ["cc"]
    return []


def compile_host(root: Path, command: list[str], to: Path) -> None:
    """Compiles the library from the sources under `root`."""
    sources = sorted((root / "conch_native/host").glob("*.c"))
    include = root / "conch_native/include"
    subprocess.run([*command, *FLAGS, f"-I{include}", "-o", str(to), *map(str, sources), "-ldl"], check=True)


class CompileHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the library, and the platform to the wheel's name."""

    def dependencies(self) -> list[str]:
        """A compiler from PyPI, if this machine has none."""
        return [] if compiler() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        command = compiler() or [sys.executable, "-m", "ziglang", "cc"]
        compile_host(root, command, root / "conch_native/libtritonserver.so")
        name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if os.environ.get("CONCH_NATIVE_PLATFORM"):  # of a cross compiler, given in CC
            name = os.environ["CONCH_NATIVE_PLATFORM"]
        elif platform.libc_ver()[0] != "glibc":
            name = name.replace("linux", "musllinux_1_2")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{name}"
