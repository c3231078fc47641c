"""Worker processes of Python models that are killed, or end themselves, in every way there is."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.leaks import no_leaks
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving
from tests.support.workers import ask, workers_of, write_hazards
from tritonclient.utils import InferenceServerException

DIED = "Stub process 'hazards_0_0' is not healthy. Its process "


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_hazards(directory)
    write_hazards(directory, "many", 3)
    write_hazards(directory, "bounded", 1, CONCH_MAX_EXECUTION_SECONDS="1", CONCH_MEMORY_LIMIT_MB="700")
    return directory


@pytest.fixture(scope="module")
def shared(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository) as server:
        with client_of(server) as client:
            ask(client)
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing_behind(shared: ServerProcess) -> Iterator[None]:
    """As for all tests, but that the server may have other workers in place of those it had."""
    with no_leaks(server=shared.process.pid):
        yield


def _refused(error: InferenceServerException) -> tuple[str, str]:
    return str(error.status()), str(error.message())


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("exit", "exited with status 5."),
        ("crash", "was killed by signal 11 (SIGSEGV)."),
        ("close", "was killed by signal 9 (SIGKILL): it has closed its socket."),
        ("garbage", "was killed by signal 9 (SIGKILL): "),
    ],
)
def test_ways_to_die(shared: ServerProcess, order: str, how: str) -> None:
    """Each costs the request that it is about, and nothing else."""
    with client_of(shared) as client:
        before = ask(client)
        with pytest.raises(InferenceServerException) as raised:
            ask(client, orders={"do": order})
        status, message = _refused(raised.value)
        assert status == "StatusCode.UNAVAILABLE"
        assert message.startswith(
            f"Failed to process the request(s) for model instance 'hazards_0_0', message: {DIED}{how}"
        )
        assert ask(client) != before
        assert not psutil.pid_exists(before)


@pytest.mark.parametrize("order", ["print", "spawn", "fork"])
def test_what_a_worker_survives(shared: ServerProcess, order: str) -> None:
    with client_of(shared) as client:
        before = ask(client)
        assert ask(client, orders={"do": order}) == before
        os.kill(before, signal.SIGKILL)
        after = eventually(lambda: _served(client), "it is back")
        assert after != before
        # Its children have gone with it.
        eventually(lambda: len(workers_of(shared)) == 5, "nothing else is left")


def _served(client: object) -> int | None:
    try:
        return ask(client)  # type: ignore[arg-type]
    except InferenceServerException as error:
        assert _refused(error)[0] == "StatusCode.UNAVAILABLE"
        return None


def test_system_exit_is_an_error_like_any_other(shared: ServerProcess) -> None:
    with client_of(shared) as client:
        before = ask(client)
        with pytest.raises(InferenceServerException, match="message: SystemExit: 6"):
            ask(client, orders={"do": "raise SystemExit"})
        assert ask(client) == before


def test_a_hungry_model_gets_a_memory_error(shared: ServerProcess) -> None:
    with client_of(shared) as client:
        before = ask(client, "bounded")
        with pytest.raises(InferenceServerException, match="MemoryError: Unable to allocate") as raised:
            ask(client, "bounded", {"do": "eat"})
        assert "(the model's process may use 700 MiB: parameter 'CONCH_MEMORY_LIMIT_MB')" in str(raised.value)
        assert ask(client, "bounded") == before


@pytest.mark.parametrize("order", ["hang", "hang in C", "stop"])
def test_an_execution_that_hangs_is_ended(shared: ServerProcess, order: str) -> None:
    with client_of(shared) as client:
        before = ask(client, "bounded")
        with pytest.raises(InferenceServerException) as raised:
            ask(client, "bounded", {"do": order})
        status, message = _refused(raised.value)
        assert status == "StatusCode.DEADLINE_EXCEEDED"
        assert "longer than the 1 s that 'CONCH_MAX_EXECUTION_SECONDS' allows" in message
        assert ask(client, "bounded") != before
    if order != "stop":
        report = next(
            line["message"] for line in reversed(shared.logs()) if f"(pid {before}) died" in line["message"]
        )
        assert "in _do" in report and "in execute" in report


def test_queued_requests_wait_for_the_next_worker(shared: ServerProcess, tmp_path: Path) -> None:
    """Only what the worker had is lost, and it is told when to come again."""
    outcomes: dict[int, int | InferenceServerException] = {}

    def send(number: int, orders: dict[str, str]) -> None:
        with client_of(shared) as client:
            try:
                outcomes[number] = ask(client, orders=orders, value=number)
            except InferenceServerException as error:
                outcomes[number] = error

    with client_of(shared) as client:
        pid = ask(client)
        started = tmp_path / "started"
        threads = [threading.Thread(target=send, args=(0, {"do": "hang", "started": str(started)}))]
        threads[0].start()
        eventually(started.exists, "the first one runs")
        threads += [threading.Thread(target=send, args=(number, {})) for number in range(1, 5)]
        for thread in threads[1:]:
            thread.start()

        def queued() -> bool:
            (stats,) = client.get_inference_statistics("hazards").model_stats
            return _pending(shared) == 4 and stats.name == "hazards"

        eventually(queued, "the others are queued")
        os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join(WAIT_S)
    lost = outcomes.pop(0)
    assert isinstance(lost, InferenceServerException)
    assert _refused(lost)[0] == "StatusCode.UNAVAILABLE"
    assert "was killed by signal 9 (SIGKILL)" in _refused(lost)[1]
    assert len(outcomes) == 4 and len({*outcomes.values()}) == 1
    assert all(isinstance(each, int) and each != pid for each in outcomes.values())


def _pending(server: ServerProcess) -> int:
    from tests.support.metrics import of_model, scrape

    return int(of_model(scrape(server.metrics_url), "hazards", "conch_pending_requests") or 0)


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_random_workers_are_killed_under_load(shared: ServerProcess, kills: int) -> None:
    """Only requests in flight fail, each with UNAVAILABLE, and the model goes on answering."""
    over = threading.Event()
    lock = threading.Lock()
    succeeded: list[float] = []
    failed: list[InferenceServerException] = []

    def load() -> None:
        with client_of(shared) as client:
            while not over.is_set():
                begun = time.monotonic()
                try:
                    ask(client, "many")
                except InferenceServerException as error:
                    with lock:
                        failed.append(error)
                else:
                    with lock:
                        succeeded.append(begun)

    def pids() -> set[int]:
        return {worker.pid for worker in workers_of(shared) if worker.status() != psutil.STATUS_ZOMBIE}

    with client_of(shared) as client:
        others = {ask(client), ask(client, "bounded")}
    chance = random.Random(6)
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    gaps = []
    try:
        for _ in range(kills):
            victims = eventually(lambda: len(found := pids() - others) == 3 and found, "three workers")
            os.kill(chance.choice(sorted(victims)), signal.SIGKILL)
            killed = time.monotonic()

            def back(killed: float = killed) -> float | None:
                with lock:
                    return next((begun for begun in reversed(succeeded) if begun > killed), None)

            eventually(back, "requests that come after it are answered")
            gaps.append(time.monotonic() - killed)
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    print(f"back after {sorted(gaps)[len(gaps) // 2]:.3f} s in the median, at most {max(gaps):.3f} s")
    assert {_refused(error)[0] for error in failed} <= {"StatusCode.UNAVAILABLE"}
    assert all("was killed by signal 9 (SIGKILL)" in _refused(error)[1] for error in failed)
    assert len(failed) <= kills  # each worker runs one request at a time
    assert len(succeeded) > kills


def test_workers_end_with_their_server(repository: Path, tmp_path: Path) -> None:
    """Also one that hangs in C code and holds the interpreter's lock."""
    with serving(repository) as server:
        workers = workers_of(server)
        assert len(workers) == 5
        started = tmp_path / "started"

        def hang() -> None:
            with client_of(server) as client, pytest.raises(InferenceServerException):
                ask(client, orders={"do": "hang in C", "started": str(started)})

        thread = threading.Thread(target=hang)
        thread.start()
        eventually(started.exists, "it hangs")
        server.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=WAIT_S)
        assert not alive
        thread.join(WAIT_S)
        server.process.wait()


def test_nothing_is_left_of_workers_that_were_unloaded(repository: Path) -> None:
    with serving(
        repository, flags=["--model-control-mode=explicit", "--load-model=hazards"]
    ) as server, client_of(server) as client:
        process = psutil.Process(server.process.pid)

        def cycle(how: str) -> None:
            client.load_model("many")
            ask(client, "many", {"do": "spawn"})
            if how == "kill":
                for worker in workers_of(server):
                    worker.kill()
            client.unload_model("many")
            eventually(lambda: not client.is_model_ready("many"), "it is unloaded")
            eventually(lambda: len(workers_of(server)) == 1, "its workers have ended")

        cycle("unload")
        eventually(lambda: _served(client), "the other is there")
        before = process.num_fds(), process.num_threads()
        for how in ("unload", "kill", "unload"):
            cycle(how)
        eventually(lambda: _served(client), "the other is there")
        eventually(lambda: (process.num_fds(), process.num_threads()) <= before, "nothing is left")


def test_the_crash_report(shared: ServerProcess) -> None:
    with client_of(shared) as client:
        before = ask(client)
        with pytest.raises(InferenceServerException):
            client.infer(
                "hazards",
                _inputs(),
                request_id="the last one",
                parameters={"do": "crash"},
                client_timeout=WAIT_S,
            )
        ask(client)
    reports = [line for line in shared.logs() if f"(pid {before}) died" in line["message"]]
    assert len(reports) == 1
    message = reports[0]["message"]
    assert message.startswith(
        f"worker of 'hazards_0_0' (pid {before}) died. Its process was killed by signal 11 (SIGSEGV).\n"
        f"requests in flight: 1, with the ids 'the last one'\nexecuting for: "
    )
    assert "Fatal Python error: Segmentation fault" in message
    assert "hazards_model" not in message and "in _do\n" in message


def _inputs() -> list[object]:
    import numpy as np
    from tests.support.servers import tensor

    return [tensor("IN", np.array([1], np.int32), "INT32")]
