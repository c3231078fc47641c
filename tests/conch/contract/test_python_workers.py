"""Python models in worker processes: how they start, and what clients see when they can't."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.hazards import ask, workers_of, write_hazards
from tests.support.metrics import get, of_model, scrape
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
    serving_process,
    started,
)
from tests.support.worker_models import loaded
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.process

EXPLICIT = ["--model-control-mode=explicit"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server without models, and its repository."""
    repository = tmp_path_factory.mktemp("models")
    with serving_process(repository, flags=EXPLICIT) as server, client_of(server) as client:
        assert client.is_server_live()
        yield server, repository


def why_not(client: Client, model: str) -> str:
    """The error of a load."""
    with pytest.raises(InferenceServerException) as raised:
        client.load_model(model)
    return str(raised.value.message())


def test_a_model_and_its_finalize(served: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    server, repository = served
    finalized = tmp_path / "finalized"
    write_hazards(repository, "tidy", 2, finalized=str(finalized))
    with loaded(server, "tidy") as client:
        pids = {worker.pid for worker in workers_of(server)}
        assert len(pids) == 2
        assert ask(client, "tidy") in pids
        assert not finalized.exists()
    assert finalized.exists()


def test_initialize_that_raises(served: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    """The text is that of a model in the server's process."""
    server, repository = served
    (flag := tmp_path / "flag").touch()
    write_hazards(repository, "raises", raises=str(flag))
    path = repository / "raises" / "1" / "model.py"
    with client_of(server) as client:
        texts = [why_not(client, "raises")]
        write_hazards(repository, "raises", raises=str(flag), CONCH_PLACEMENT="in_process")
        texts.append(why_not(client, "raises"))
        assert texts[0] == texts[1]
        assert "Internal: ValueError: told to\n\nAt:\n" in texts[0] and str(path) in texts[0]
        assert not workers_of(server)
        flag.unlink()
    with loaded(server, "raises") as client:
        ask(client, "raises")


def test_initialize_that_ends_the_process(served: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    server, repository = served
    (flag := tmp_path / "flag").touch()
    write_hazards(repository, "exits", 2, exits=str(flag))
    with client_of(server) as client:
        assert re.search(  # whichever of the two was first
            "Unavailable: Stub process 'exits_0_[01]' is not healthy. Its process exited with status 3. The "
            "last it wrote to standard error:\nleaving now",
            why_not(client, "exits"),
        )
        assert not workers_of(server)
        assert not client.is_model_ready("exits")


def test_initialize_that_takes_too_long(served: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    server, repository = served
    (flag := tmp_path / "flag").touch()
    text = ""
    for seconds in (4, 16, 64, 128):  # a busy machine may take longer to get into the model's code
        write_hazards(repository, "slow", hangs=str(flag), CONCH_START_TIMEOUT_SECONDS=str(seconds))
        with client_of(server) as client:
            text = why_not(client, "slow")
        late = f"it had not loaded the model after the {seconds} s that 'CONCH_START_TIMEOUT_SECONDS' allows"
        assert late in text
        if "in initialize" in text:
            break
    assert "in initialize" in text, "the stack says where"
    assert not workers_of(server)


def test_quorum_and_refusals(served: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    """A model whose workers can't be started again is not ready, and says so until they can."""
    server, repository = served
    flag = tmp_path / "flag"
    write_hazards(repository, "dying", 3, raises=str(flag))
    with loaded(server, "dying") as client:
        workers = sorted(worker.pid for worker in workers_of(server))
        assert client.is_model_ready("dying")
        flag.touch()
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: workers[0] not in [each.pid for each in workers_of(server)], "one has ended")
        assert client.is_model_ready("dying"), "two of three are enough"
        assert ask(client, "dying") in workers[1:]
        for pid in workers[1:]:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not client.is_model_ready("dying"), "it is not ready")

        def refused() -> str | None:
            try:
                ask(client, "dying", timeout_s=WAIT_S)
            except InferenceServerException as error:
                assert error.status() == "StatusCode.UNAVAILABLE"
                return str(error.message()) if "The next try to start it is in" in str(error) else None
            return None

        text = eventually(refused, "there is nothing to wait for any more")
        assert "message: Stub process 'dying_0_" in text and "ValueError: told to" in text
        status, headers, _ = get(
            f"http://{server.http_address}/v2/models/dying/infer",
            "POST",
            b'{"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}]}',
        )
        assert status == 503 and int(headers.get("retry-after", 0)) >= 1
        assert of_model(scrape(server.metrics_url), "dying", "conch_workers", state="serving") == 0
        flag.unlink()
        eventually(lambda: client.is_model_ready("dying"), "it is ready again")
        assert ask(client, "dying") not in workers
        restarts = of_model(scrape(server.metrics_url), "dying", "conch_worker_restarts_total")
        assert restarts is not None and restarts >= 6


def test_what_a_model_prints_is_in_the_log(served: tuple[ServerProcess, Path]) -> None:
    server, repository = served
    directory = write_hazards(repository, "talks") / "1" / "model.py"
    directory.write_text(
        directory.read_text().replace(
            "        responses = []", '        print("hello", 1)\n        responses = []', 1
        )
    )
    with loaded(server, "talks") as client:
        ask(client, "talks")

        def lines() -> list[str]:
            return [line["level"] for line in server.logs() if line["message"] == "talks_0_0: hello 1"]

        assert eventually(lines, "it is logged while the worker runs") == ["info"]


def test_unloading_while_a_worker_is_restarted(served: tuple[ServerProcess, Path], tmp_path: Path) -> None:
    server, repository = served
    flag = tmp_path / "flag"
    write_hazards(repository, "stuck", hangs=str(flag))
    with loaded(server, "stuck"):
        (worker,) = workers_of(server)
        flag.touch()
        worker.kill()
        eventually(lambda: [each for each in workers_of(server) if each.pid != worker.pid], "it starts again")
    # The unload has returned, although the start goes on for longer than a test may take.


@pytest.mark.parametrize("where", ["initialize", "auto_complete_config"])
def test_unloading_ends_a_start(served: tuple[ServerProcess, Path], tmp_path: Path, where: str) -> None:
    """Without a time limit, it would go on for as long as the model likes."""
    server, repository = served
    (flag := tmp_path / "flag").touch()
    write_hazards(repository, "endless", hangs=str(flag))
    if where == "auto_complete_config":
        (repository / "endless/1/model.py").write_text("import time\ntime.sleep(1000)\n")
    texts: list[str] = []

    def load() -> None:
        with client_of(server) as client:
            texts.append(why_not(client, "endless"))

    thread = threading.Thread(target=load)
    thread.start()
    eventually(lambda: workers_of(server), "it starts")
    with client_of(server) as client:
        client.unload_model("endless")
    thread.join()
    assert "current load operation is out-dated" in texts[0]
    eventually(lambda: not workers_of(server), "it has ended")


@pytest.mark.parametrize("parameter", ["CONCH_MAX_EXECUTION_SECONDS", "CONCH_MEMORY_LIMIT_MB"])
def test_what_needs_a_worker_is_refused_in_process(
    served: tuple[ServerProcess, Path], parameter: str
) -> None:
    server, repository = served
    write_hazards(repository, "limited", 1, CONCH_PLACEMENT="in_process", **{parameter: "7"})
    with client_of(server) as client:
        assert f"parameter '{parameter}' needs a process of the model's own" in why_not(client, "limited")


def test_the_option_of_the_backend(tmp_path: Path) -> None:
    write_hazards(tmp_path, "here")
    write_hazards(tmp_path, "there", CONCH_PLACEMENT="worker")
    with serving_process(tmp_path, flags=[IN_PROCESS]) as server, client_of(server) as client:
        assert ask(client, "here") == server.process.pid
        assert ask(client, "there") == workers_of(server)[0].pid
    with started(
        f"--model-repository={tmp_path}", "--grpc-port=0", "--backend-config=python,placement=there"
    ) as refused:
        assert refused.wait() == 1
        assert "--backend-config=python,placement must be 'in_process' or 'worker'" in refused.errors


def test_a_stop_does_not_wait_for_a_worker_that_hangs(tmp_path: Path) -> None:
    """The exit timeout counts, and no worker outlives the server."""
    write_hazards(tmp_path)
    up = tmp_path / "up"
    with started(f"--model-repository={tmp_path}", "--grpc-port=0", "--exit-timeout-secs=1") as server:
        server.wait_ready()

        def hang() -> None:
            with client_of(server) as client, pytest.raises(InferenceServerException):
                ask(client, orders={"do": "hang", "started": str(up)})

        thread = threading.Thread(target=hang)
        thread.start()
        eventually(up.exists, "it hangs")
        workers = workers_of(server)
        assert server.stop() == 1
        thread.join()
        assert not psutil.wait_procs(workers, timeout=WAIT_S)[1]
