"""The container image, built by the steps of its Dockerfile and run as a strict cluster runs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.dockerfile import Builder, Image, first_process, kill, refusal
from tests.support.servers import (
    NUMBERS_CONFIG,
    ROOT,
    START_S,
    WAIT_S,
    check_simple,
    copy_example,
    eventually,
    free_port,
    simple_inputs,
    tensor,
    write_model,
)

PREPARED = Path(os.environ.get("CONCH_IMAGE_BASE", Path.home() / ".cache" / "conch-tests" / "image"))
BASE = PREPARED / "base"
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
LARGE = 20_000_000
"""Elements of more bytes than /dev/shm has."""
STARTS = {
    "serve": ["serve", "--model-repository=/models"],
    "triton": ["tritonserver", "--model-store=/models", "--strict-model-config=false", "--allow-http=true"],
    "conch": ["conch", "serve", "--model-repository", "/models"],
    "flags": ["--model-repository=/models"],
}
reason = refusal(BASE)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]


@dataclass
class Container:
    """A running container.

    Attributes:
        pid: Its first process.
        address: Host and port of gRPC.
    """

    pid: int
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self, name: str) -> str:
        """A line of the first process's status in ``/proc``."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{name}:\s*(.*)$", text, re.MULTILINE)
        assert found
        return found[1]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    at = tmp_path_factory.mktemp("stages")
    builder = Builder(ROOT / "deploy" / "Dockerfile", ROOT, BASE, PREPARED / "packages", at)
    built = builder.build(EXTRAS="onnxruntime")
    sizes = {
        name: megabytes(path) for name, path in {"base": BASE, "conch": built.root / "opt/conch"}.items()
    }
    sys.stdout.write(
        f"image: {sizes['base']:.0f} MB of Debian with Python, {sizes['conch']:.0f} MB of conch\n"
    )
    yield built
    shutil.rmtree(at)


def megabytes(path: Path) -> float:
    done = subprocess.run(["du", "-sk", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0]) * 1024 / 1e6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    directory.chmod(0o755)
    copy_example(directory, "simple")
    write_model(directory, "echo", NUMBERS_CONFIG, {"model.py": MODEL})
    return directory


@contextmanager
def running(image: Image, models: Path, log: Path, words: list[str]) -> Iterator[Container]:
    """A container that listens on free ports."""
    grpc, http = free_port(), free_port()
    ports = [f"--grpc-port={grpc}", f"--http-port={http}", "--metrics-port=0", "--log-json=false"]
    begun = time.monotonic()
    with log.open("wb") as errors:
        process = image.start(models, [*words, *ports], stderr=errors, stdin=subprocess.DEVNULL)
    try:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            return "open: " in log.read_text()

        eventually(listens, "it listens", START_S)
        sys.stdout.write(f"start: {time.monotonic() - begun:.2f} s\n")
        pid = first_process(process)
        assert pid is not None
        yield Container(pid, f"127.0.0.1:{grpc}", process, log)
    finally:
        kill(process)


@pytest.mark.parametrize("start", STARTS)
def test_it_serves_as_a_user_with_a_read_only_root(
    image: Image, models: Path, tmp_path: Path, start: str
) -> None:
    with running(image, models, tmp_path / "log", STARTS[start]) as container:
        assert container.status("Uid").split() == ["1000"] * 4
        assert container.status("NSpid").split()[-1] == "1"
        root = Path(f"/proc/{container.pid}/root")
        for place in (root, root / "models"):
            assert os.statvfs(place).f_flag & os.ST_RDONLY
        assert image.is_healthy(container.pid)
        with triton.InferenceServerClient(container.address) as client:
            check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))
            numbers = np.arange(LARGE, dtype=np.float32)
            result = client.infer("echo", [tensor("IN", numbers)], client_timeout=WAIT_S)
            np.testing.assert_array_equal(result.as_numpy("OUT"), numbers)
        os.kill(container.pid, signal.SIGTERM)
        assert container.process.wait(WAIT_S) == 0, container.log.read_text()


def test_other_words_are_commands_or_programs_of_the_image(
    image: Image, models: Path, tmp_path: Path
) -> None:
    def told(*words: str, models: Path = models) -> tuple[int, str]:
        process = image.start(models, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, output.decode()

    code, text = told("check", "/models")
    assert (code, "simple" in text) == (0, True), text
    assert told("python", "-c", "print(6 * 7)") == (0, "42\n")
    code, text = told("tritonsever", "--model-store=/models")
    assert (code, text.startswith("tritonsever can't be run: No such file or directory; expected")) == (
        127,
        True,
    )
    code, text = told()
    assert (code, "--model-repository must be specified" in text) == (1, True), text
    for path in (private := tmp_path / "private", private / "m"):
        path.mkdir(mode=0o700)
    code, text = told("serve", "--model-repository=/models", "--log-json=false", models=private)
    assert (code, "'/models' can't be read by user 1000 and group 1000" in text) == (
        1,
        True,
    )
    code, text = told("health")
    assert (code, text) == (1, "conch health: no server found\n")
