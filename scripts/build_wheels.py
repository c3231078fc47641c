"""Builds the compiled wheel for each Python of this machine: ``python -m scripts.build_wheels [PYTHON ...]``.

Without arguments these are ``python3.11`` and later on PATH, and pyenv's, the newest of each minor version.
The wheels go to ``dist`` with the tag of the oldest glibc that has what they call.

``--environment FOLDER`` makes an environment there instead: the wheel of the Python that runs this, besides
the packages of its environment. It has no pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.build_release import TOOL_FOLDER, tool_environment, with_oldest_glibc
from scripts.test_pythons import interpreters

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "dist"
MOST_BYTES = 25_000_000
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def has_headers(python: str) -> bool:
    """True if extensions can be compiled for an interpreter."""
    code = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "True"


def newest(found: dict[str, str]) -> dict[str, str]:
    """The interpreters of the newest version of each minor one, by versions in order."""
    return dict({version.rpartition(".")[0]: (version, python) for version, python in found.items()}.values())


def build(python: str, folder: Path) -> Path:
    """Builds the wheel of an interpreter; returns its path in the folder."""
    command = [*PIP, "--python", python, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, env={**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path) -> None:
    """Makes an environment of the compiled wheel and of this environment's packages."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    inside = str(folder / "bin" / "python")
    with TemporaryDirectory() as built:
        wheel = build(inside, Path(built))  # mypy would check all packages of this environment, in minutes
        subprocess.run([*PIP, "--python", inside, "install", "--no-deps", wheel], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # Behind its own folder in the path; links to work trees that lie there are not followed.
    Path(own, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")


def main(arguments: Sequence[str]) -> None:
    """Builds all, and lists them; ends with an error if one is too large or none can be built."""
    if arguments[:1] == ["--environment"]:
        make_environment(ROOT / arguments[1])
        return
    programs = tool_environment(TOOL_FOLDER)
    OUT.mkdir(exist_ok=True)
    built = []
    for version, python in newest(interpreters(arguments)).items():
        if not has_headers(python):
            print(f"Python {version} has no Python.h: its wheel is left out", flush=True)
            continue
        print(f"Python {version}: compiling, which takes minutes ...", flush=True)
        with TemporaryDirectory() as folder:
            wheel = with_oldest_glibc(build(python, Path(folder)), programs, OUT)
            built.append(wheel if wheel.parent == OUT else Path(shutil.move(wheel, OUT)))
    for wheel in built:
        size = wheel.stat().st_size
        print(f"{size / 1e6:6.2f} MB  {wheel.relative_to(ROOT)}")
        if size > MOST_BYTES:
            sys.exit(f"{wheel.name} is larger than {MOST_BYTES / 1e6:.0f} MB")
    if not built:
        sys.exit("there is no Python 3.11 or newer with headers on PATH or in pyenv")


if __name__ == "__main__":
    main(sys.argv[1:])
