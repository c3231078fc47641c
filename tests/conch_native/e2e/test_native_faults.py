"""Libraries that crash, break the rules of the interface, or are replaced while they serve."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.native_backends import NativeBackends, native_backends
from tests.support.native_builds import BACKENDS, build_backend
from tests.support.servers import ServerProcess, client_of, eventually
from tritonclient.utils import InferenceServerException

__all__ = ["native_backends"]

pytestmark = pytest.mark.process

CRASH = """
backend: "crash"
max_batch_size: 4
input {{ name: "IN" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: 1 }}
parameters {{ key: "where" value {{ string_value: "{where}" }} }}
parameters {{ key: "how" value {{ string_value: "{how}" }} }}
"""
CHAOS = """
backend: "chaos"
max_batch_size: 8
input { name: "IN" data_type: TYPE_UINT8 dims: 3 }
output { name: "OUT" data_type: TYPE_UINT8 dims: 8 }
dynamic_batching { }
"""
RELEASE_FIRST, NEVER, RELEASE_TWICE, AFTER_FINAL, FAIL, DELETE, TALK, FAIL_BATCH = 1, 3, 4, 5, 6, 7, 9, 10


def write(root: Path, name: str, config: str) -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    return root


def asked(client: triton.InferenceServerClient, model: str, value: int = 1) -> int:
    tensor = triton.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return int(client.infer(model, [tensor], request_id="an-id").as_numpy("OUT")[0, 0])


@contextmanager
def loads(
    built: NativeBackends, models: Path, *names: str
) -> Iterator[tuple[ServerProcess, triton.InferenceServerClient]]:
    """A server in explicit mode."""
    with (
        built.serving(models, *names, flags=("--model-control-mode=explicit",)) as server,
        client_of(server) as client,
    ):
        yield server, client


def crashing(root: Path, where: str, how: str = "") -> str:
    name = f"in-{where}-{how or 'segv'}"
    write(root, name, CRASH.format(where=where, how=how))
    return name


def test_crashes_of_each_entry_point(tmp_path: Path, native_backends: NativeBackends) -> None:
    root = tmp_path / "models"
    write(root, "good", CRASH.format(where="", how=""))
    with loads(native_backends, root, "crash") as (server, client):
        client.load_model("good")
        for where in ("ModelInitialize", "ModelInstanceInitialize"):
            for how in ("", "abort", "exit"):
                name = crashing(root, where, how)
                with pytest.raises(InferenceServerException, match=f"load failed for model '{name}'"):
                    client.load_model(name)
        for how in ("", "abort", "exit", "kill"):
            name = crashing(root, "ModelInstanceExecute", how)
            client.load_model(name)
            assert asked(client, name) == 1
            with pytest.raises(InferenceServerException) as failed:
                asked(client, name, 13)
            assert failed.value.status() == "StatusCode.UNAVAILABLE"

            def answers(name: str = name) -> bool:
                try:
                    return asked(client, name) == 1
                except InferenceServerException as error:
                    assert error.status() == "StatusCode.UNAVAILABLE"
                    return False

            eventually(answers, "the worker has restarted")
        for where in ("ModelInstanceFinalize", "ModelFinalize", "Finalize"):
            name = crashing(root, where)
            client.load_model(name)
            client.unload_model(name)
        assert asked(client, "good") == 1
        report = server.errors
    assert "C stack, most recent call first" in report
    assert "TRITONBACKEND_ModelInstanceExecute" in report
    assert "an-id" in report


def sent(client: triton.InferenceServerClient, what: int, delay: int = 0) -> bytes:
    tensor = triton.InferInput("IN", [1, 3], "UINT8")
    tensor.set_data_from_numpy(np.array([[what, delay, 0]], np.uint8))
    return bytes(client.infer("chaos", [tensor]).as_numpy("OUT"))


def test_rules_that_are_broken(tmp_path: Path, native_backends: NativeBackends) -> None:
    root = write(tmp_path / "models", "chaos", CHAOS)
    with loads(native_backends, root, "chaos") as (_, client):
        client.load_model("chaos")
        for delay in (0, 200):
            assert sent(client, RELEASE_FIRST, delay) == b"released"
            assert sent(client, RELEASE_TWICE, delay) == b"answered"
            assert sent(client, AFTER_FINAL, delay) == b"the last"
            assert sent(client, DELETE, delay) == b"deleted."
            assert sent(client, TALK, delay) == b"answered"
            with pytest.raises(InferenceServerException, match="it fails"):
                sent(client, FAIL, delay)
            with pytest.raises(
                InferenceServerException, match="released the request without a final response"
            ):
                sent(client, NEVER, delay)
            with pytest.raises(InferenceServerException, match="the batch fails"):
                sent(client, FAIL_BATCH, delay)
        index: Any = client.get_model_repository_index(as_json=True)["models"][0]
        for note in (
            "releases requests more than once",
            "releases requests without a final response",
            "sends several responses to a request",
        ):
            assert note in index["reason"]


def worker_of(server: ServerProcess, model: str) -> int:
    """The process id of a model's worker."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                title = (each / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(f"conch worker {model}".encode()):
                return int(each.name)
    raise AssertionError(f"no worker of '{model}'")


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.slow
def test_requests_leave_nothing(tmp_path: Path, native_backends: NativeBackends) -> None:
    root = write(tmp_path / "models", "chaos", CHAOS)
    with loads(native_backends, root, "chaos") as (server, client):
        client.load_model("chaos")
        worker = worker_of(server, "chaos")

        def run(count: int) -> None:
            for number in range(count):
                what = (RELEASE_FIRST, RELEASE_TWICE, AFTER_FINAL, DELETE, TALK)[number % 5]
                sent(client, what, number % 3)

        run(3000)  # until memory is what it stays, and the ring of released requests is full
        before = resident_kib(worker), len(os.listdir(f"/proc/{worker}/fd"))
        run(10_000)
        after = resident_kib(worker), len(os.listdir(f"/proc/{worker}/fd"))
        assert after[0] - before[0] < 2048, (before, after)  # 0.2 KiB for each request would be a leak
        assert after[1] <= before[1] + 1


def test_a_library_is_replaced_while_it_serves(tmp_path: Path, native_backends: NativeBackends) -> None:
    # The library is the version's own; a new version brings a new library.
    root = write(tmp_path / "models", "m", CRASH.format(where="", how="").replace('"crash"', '"own"'))
    library = build_backend(BACKENDS / "crash.c", tmp_path / "built", name="own")
    shutil.copy(library, root / "m/1")
    other = build_backend(BACKENDS / "crash.c", tmp_path / "built2", "-DOFFSET=100", name="own")
    with loads(native_backends, root) as (server, client):
        client.load_model("m")
        assert asked(client, "m") == 1
        stop, failures, answers = threading.Event(), list[str](), set[int]()

        def load() -> None:
            with client_of(server) as own:
                while not stop.is_set():
                    try:
                        answers.add(asked(own, "m"))
                    except InferenceServerException as error:
                        failures.append(str(error))

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for version in (2, 3, 4):
                (root / f"m/{version}").mkdir()
                shutil.copy(other if version % 2 == 0 else library, root / f"m/{version}")
                client.load_model("m")
                wanted = 101 if version % 2 == 0 else 1
                assert asked(client, "m") == wanted
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert answers == {1, 101}
