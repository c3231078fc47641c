"""`conch new backend --c`, and compiled backends in `conch.testing`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.native_backends import NativeBackends, native_backends
from tests.support.servers import client_of

import conch.testing
from conch_tools import new_command

__all__ = ["native_backends"]

pytestmark = [pytest.mark.process, pytest.mark.slow]


def run(packages: Path, *command: str | Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_backend_compiles_passes_its_tests_and_serves(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    # The name of a type, which must not meet the language's.
    assert new_command.run(["backend", "int", "--c", f"--directory={tmp_path}"]) == 0
    made = tmp_path / "int_backend"
    run(native_backends.packages, "make", "-C", made, f"PYTHON={sys.executable}", "CFLAGS=-Werror")
    run(native_backends.packages, sys.executable, "-m", "pytest", made)
    with native_backends.serving(made / "models") as server, client_of(server) as client:
        given = triton.InferInput("INPUT", [1, 2], "FP32").set_data_from_numpy(np.array([[1, 3]], np.float32))
        assert client.infer("int", [given]).as_numpy("OUTPUT").tolist() == [[-1, 1]]
    assert new_command.run(["backend", "int", "--c", f"--directory={tmp_path}"]) == 1


def test_backends_in_a_directory_are_tested_without_a_server(
    tmp_path: Path, native_backends: NativeBackends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(native_backends.packages)
    library = native_backends.build("probe")
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text('backend: "probe"')  # which completes it
    inputs = {"IN": np.frombuffer(b"some", np.uint8)[None]}
    outputs = conch.testing.run(tmp_path / "m", inputs, backend_directory=library.parents[1])
    assert outputs["OUT"].tobytes() == b"some"
    assert outputs.parameters["by"] == "probe"
    with pytest.raises(conch.testing.ModelError, match="unable to find backend library for backend 'probe'"):
        conch.testing.run(tmp_path / "m", inputs)
