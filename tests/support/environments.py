"""Models that ask for environments, and what those are made of: wheels, venvs and archives, all made here."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from conch.core.spec import InstanceGroup, ModelSpec


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: str = "") -> Path:
    """Writes a wheel of Python files."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in {**contents, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return target


def site_of_numpy() -> str:
    """Directory in which the numpy of these tests is installed."""
    return str(Path(np.__file__).parents[1])


def numpy_wheel(folder: Path) -> Path:
    """A wheel by the name of numpy, through which an environment finds the numpy of these tests."""
    return wheel(folder, "numpy", np.__version__, {"numpy_of_the_tests.pth": site_of_numpy() + "\n"})


def make_venv(prefix: Path, numpy: bool = True) -> Path:
    """A venv of this interpreter; gives the folder of its packages."""
    venv.create(prefix, symlinks=True, with_pip=False)
    site = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if numpy:
        (site / "numpy_of_the_tests.pth").write_text(site_of_numpy() + "\n")
    return site


def packed(prefix: Path, archive: Path, mode: str = "w:gz") -> Path:
    """Packs an environment as conda-pack does: its contents are the contents of the archive."""
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        for path in sorted(prefix.iterdir()):
            tar.add(path, path.name)
    return archive


def tar_of(archive: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    """An archive of just these members."""
    with tarfile.open(archive, "w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                info.mode = 0o644
                tar.addfile(info, io.BytesIO(member[1]))
    return archive


def link(name: str, target: str, hard: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.LNKTYPE if hard else tarfile.SYMTYPE
    info.linkname = target
    return info


def of_type(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    return info


def model(
    root: Path,
    files: Mapping[str, str] | None = None,
    parameters: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    name: str = "m",
) -> ModelSpec:
    """Writes the files of a model, and says what the server would know of it."""
    directory = root / name
    for path, text in {"1/model.py": "", **(files or {})}.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return ModelSpec(
        name=name,
        version=1,
        platform="",
        backend="python",
        max_batch_size=0,
        inputs=(),
        outputs=(),
        directory=directory,
        version_directory=directory / "1",
        model_file="model.py",
        instance_groups=(InstanceGroup("cpu"),),
        parameters=parameters or {},
        backend_options=options or {},
    )
