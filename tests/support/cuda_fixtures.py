"""A CUDA driver that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cuda import FakeCuda, build

from conch.memory.cuda import CudaDevices


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The driver's library."""
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The driver; what is done through it in this process uses the test's own files."""
    monkeypatch.setenv("FAKE_CUDA_DIR", str(tmp_path))
    return FakeCuda(driver, tmp_path)


@pytest.fixture
def devices(cuda: FakeCuda) -> CudaDevices:
    """Its devices."""
    return CudaDevices(cuda.library)
