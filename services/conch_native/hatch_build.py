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
    """The command of the machine's C compiler, ``$CC`` or ``cc``; empty if there is none."""
    given = os.environ.get("CC")
    if given:
        return shlex.split(given)
    return ["cc"] if shutil.which("cc") else []


def from_pypi(machine: str, glibc: bool) -> tuple[list[str], str]:
    """The command of ziglang's compiler, and the platform of what it makes; glibc as old as it may be."""
    libc, platform_name = ("gnu.2.17", "manylinux_2_17") if glibc else ("musl", "musllinux_1_2")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-{libc}"]
    return command, f"{platform_name}_{machine}"


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
        machine = sysconfig.get_platform().partition("-")[2]
        glibc = platform.libc_ver()[0] == "glibc"
        command, name = compiler(), f"linux_{machine}" if glibc else f"musllinux_1_2_{machine}"
        if not command:
            command, name = from_pypi(machine, glibc)
        compile_host(root, command, root / "conch_native/libtritonserver.so")
        name = os.environ.get("CONCH_NATIVE_PLATFORM", name)  # of a cross compiler, given in CC
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{name}"
