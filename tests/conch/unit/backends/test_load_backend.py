"""Backends are found through entry points; what is missing is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch import backends
from conch.core.errors import InvalidArgumentError, UnavailableError

FAKE = """
from conch.core.backend import Backend
imports = []
class Fake(Backend):
    def load(self, spec):
        raise NotImplementedError
NotABackend = dict
"""

HALF = "raise OSError('no libengine.so')\n"
BROKEN = "import a_package_nobody_has\n"


def install(folder: Path, *lines: str) -> None:
    """Leaves a distribution with entry points, as pip would."""
    info = folder / "shells-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shells\nVersion: 1.0\nProvides-Extra: broken\nProvides-Extra: heavy\n"
    )
    (info / "entry_points.txt").write_text("\n".join(("[conch.backends]", *lines, "")))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with backends."""
    (tmp_path / "fake_conch_backend.py").write_text(FAKE)
    (tmp_path / "broken_conch_backend.py").write_text(BROKEN)
    (tmp_path / "half_conch_backend.py").write_text(HALF)
    (tmp_path / "torchless_conch_backend.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    install(
        tmp_path,
        "fake = fake_conch_backend:Fake",
        "onnxruntime = fake_conch_backend:Fake",
        "wrong = fake_conch_backend:NotABackend",
        "broken = broken_conch_backend:Broken",
        "bare = broken_conch_backend:Broken",
        "named = broken_conch_backend:Broken [heavy]",
        "half = half_conch_backend:Half",
        "torchless = torchless_conch_backend:Torchless [heavy]",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(backends, "loaded", {})


@pytest.mark.usefixtures("installed")
def test_same_backend_every_time() -> None:
    backend = backends.load_backend("fake")
    assert type(backend).__name__ == "Fake"
    assert backends.load_backend("fake") is backend


def test_a_backend_that_is_installed_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    os.utime(tmp_path, (0, 0))  # times of changes are some milliseconds apart
    assert "late" not in backends.backend_names()
    install(tmp_path, "late = fake_conch_backend:Fake")
    assert "late" in backends.backend_names()


def test_unknown_backend_has_tritons_text() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        backends.load_backend("unknown")
    assert caught.value.message == (
        "unable to find backend library for backend 'unknown', try specifying runtime on the model "
        "configuration."
    )


@pytest.mark.usefixtures("installed")
def test_missing_package_names_the_extra() -> None:
    with pytest.raises(UnavailableError) as caught:
        backends.load_backend("broken")
    assert caught.value.message == (
        "backend 'broken' needs the Python package 'a_package_nobody_has', which is not installed; install "
        "it with `pip install 'shells[broken]'`"
    )
    with pytest.raises(UnavailableError, match=r"pip install 'shells\[heavy\]'"):
        backends.load_backend("named")
    with pytest.raises(UnavailableError, match=r"which is not installed$"):
        backends.load_backend("bare")
    with pytest.raises(
        UnavailableError, match=r"shells\[heavy\]'`; .*--index-url https://download.*/whl/cpu`"
    ):
        backends.load_backend("torchless")
    with pytest.raises(UnavailableError, match=r"^backend 'half' can't import its engine: no libengine\.so"):
        backends.load_backend("half")


@pytest.mark.usefixtures("installed")
def test_entry_that_is_no_backend() -> None:
    with pytest.raises(InvalidArgumentError, match=r"is not a conch\.core\.backend\.Backend"):
        backends.load_backend("wrong")


@pytest.mark.usefixtures("installed")
def test_tritons_platform_names() -> None:
    fake = type(backends.load_backend("fake"))
    assert isinstance(backends.load_backend("onnxruntime_onnx"), fake)  # found before conch's own
    assert backends.load_backend("onnxruntime_onnx") is backends.load_backend("onnxruntime")
