"""Worker processes of Python models that are killed, or end themselves, in every way there is."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.hazards import ask, workers_of, write_hazards
from tests.support.metrics import of_model, scrape
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving_process, tensor
from tests.support.worker_models import loaded
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException

NOT_HEALTHY = "Stub process 'hazards_0_0' is not healthy."


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_hazards(directory)
    write_hazards(directory, "many", 3)
    write_hazards(directory, "bounded", 1, CONCH_MAX_EXECUTION_SECONDS="4", CONCH_MEMORY_LIMIT_MB="700")
    write_hazards(directory, "childless", 1, CONCH_PROCESS_LIMIT="20")
    return directory


shared = server_fixture(flags=["--model-control-mode=explicit"], process=True)


@pytest.fixture
def client(shared: ServerProcess) -> Iterator[Client]:
    with loaded(shared, "hazards") as client:
        yield client


@pytest.fixture
def bounded(shared: ServerProcess) -> Iterator[Client]:
    with loaded(shared, "bounded") as client:
        yield client


def refusal(error: InferenceServerException) -> tuple[str, str]:
    """Status and text of an error."""
    return str(error.status()).removeprefix("StatusCode."), str(error.message())


def served(client: Client) -> int | None:
    """The process that answers, or None if there is none; any other error fails the test."""
    try:
        return ask(client)
    except InferenceServerException as error:
        assert refusal(error)[0] == "UNAVAILABLE"
        return None


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("exit", "exited with status 5."),
        ("crash", "was killed by signal 11 (SIGSEGV)."),
        ("close", ""),  # it notices that itself, or is killed
        ("garbage", "was killed by signal 9 (SIGKILL): it has sent something that can't be understood: "),
    ],
)
def test_ways_to_die(client: Client, order: str, how: str) -> None:
    """Each costs the request that it is about, and nothing else."""
    before = ask(client)
    with pytest.raises(InferenceServerException) as raised:
        ask(client, orders={"do": order})
    status, message = refusal(raised.value)
    assert status == "UNAVAILABLE"
    assert message.startswith(
        f"Failed to process the request(s) for model instance 'hazards_0_0', message: {NOT_HEALTHY} Its "
        f"process {how}"
    )
    assert ask(client) != before
    assert not psutil.pid_exists(before)


@pytest.mark.parametrize("order", ["print", "spawn", "fork"])
def test_what_a_worker_survives(client: Client, shared: ServerProcess, order: str) -> None:
    before = ask(client)
    assert ask(client, orders={"do": order}) == before
    os.kill(before, signal.SIGKILL)
    after = eventually(lambda: served(client), "it is back")
    assert after != before
    # Its children have gone with it.
    eventually(lambda: [worker.pid for worker in workers_of(shared)] == [after], "nothing else is left")


def test_workers_and_their_children_end_with_a_killed_server(repository: Path) -> None:
    with serving_process(repository, flags=["--model-control-mode=explicit"]) as server:
        with client_of(server) as client:
            client.load_model("hazards")
            worker = psutil.Process(ask(client, orders={"do": "spawn"}))
            left = [worker, *worker.children()]
            assert len(left) > 1
        server.kill()
        eventually(lambda: not any(map(runs, left)), "they have ended")


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_system_exit_is_an_error_like_any_other(client: Client) -> None:
    before = ask(client)
    with pytest.raises(InferenceServerException, match="message: SystemExit: 6"):
        ask(client, orders={"do": "raise SystemExit"})
    assert ask(client) == before


def test_a_hungry_model_gets_a_memory_error(bounded: Client) -> None:
    before = ask(bounded, "bounded")
    with pytest.raises(InferenceServerException, match="MemoryError: Unable to allocate") as raised:
        ask(bounded, "bounded", {"do": "eat"})
    assert "(the model's process may use 700 MiB: parameter 'CONCH_MEMORY_LIMIT_MB')" in str(raised.value)
    assert ask(bounded, "bounded") == before


def test_a_fork_bomb_is_stopped(shared: ServerProcess, client: Client) -> None:
    """Models without one go on meanwhile."""
    neighbour = ask(client)
    with loaded(shared, "childless") as bombed:
        before = ask(bombed, "childless")
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: [ask(client) for _ in iter(over.is_set, True)])
            try:
                with pytest.raises(
                    InferenceServerException, match="'CONCH_PROCESS_LIMIT' allows 20"
                ) as raised:
                    ask(bombed, "childless", {"do": "bomb"})
            finally:
                over.set()
            assert set(asked.result()) == {neighbour}
        assert refusal(raised.value)[0] == "UNAVAILABLE"
        after = ask(bombed, "childless")
        assert after != before
        assert {each.pid for each in workers_of(shared)} == {neighbour, after}
        bombed.unload_model("hazards")


def test_a_worker_goes_before_its_server_where_memory_runs_out(client: Client, shared: ServerProcess) -> None:
    worker, server = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (ask(client), shared.process.pid)
    )
    assert worker == min(server + 300, 1000)


@pytest.mark.parametrize("order", ["hang", "hang in C", "stop"])
def test_an_execution_that_hangs_is_ended(bounded: Client, shared: ServerProcess, order: str) -> None:
    before = ask(bounded, "bounded")
    with pytest.raises(InferenceServerException) as raised:
        ask(bounded, "bounded", {"do": order})
    status, message = refusal(raised.value)
    assert status == "DEADLINE_EXCEEDED"
    assert "longer than the 4 s that 'CONCH_MAX_EXECUTION_SECONDS' allows" in message
    assert ask(bounded, "bounded") != before
    report = next(line["message"] for line in shared.logs() if f"(pid {before}) died" in line["message"])
    assert "CONCH_MAX_EXECUTION_SECONDS" in report
    if order != "stop":  # what is stopped can't write down where it is
        assert "in _do\n" in report and "in execute\n" in report


def test_queued_requests_wait_for_the_next_worker(
    client: Client, shared: ServerProcess, tmp_path: Path
) -> None:
    """Only what the worker had is lost."""
    outcomes: dict[int, int | InferenceServerException] = {}

    def send(number: int, orders: dict[str, str]) -> None:
        with client_of(shared) as client:
            try:
                outcomes[number] = ask(client, orders=orders, value=number)
            except InferenceServerException as error:
                outcomes[number] = error

    def pending() -> float | None:
        return of_model(scrape(shared.metrics_url), "hazards", "conch_pending_requests")

    pid = ask(client)
    started = tmp_path / "started"
    threads = [threading.Thread(target=send, args=(0, {"do": "hang", "started": str(started)}))]
    threads[0].start()
    eventually(started.exists, "the first one runs")
    threads += [threading.Thread(target=send, args=(number, {})) for number in range(1, 5)]
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: pending() == 4, "the others are queued")
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT_S)
    lost = outcomes.pop(0)
    assert isinstance(lost, InferenceServerException)
    assert refusal(lost)[0] == "UNAVAILABLE"
    assert "was killed by signal 9 (SIGKILL)" in refusal(lost)[1]
    assert len(outcomes) == 4 and len({*outcomes.values()}) == 1
    assert all(isinstance(each, int) and each != pid for each in outcomes.values())


@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_random_workers_are_killed_under_load(shared: ServerProcess, kills: int) -> None:
    """Only requests in flight fail, each with UNAVAILABLE, and the model goes on answering.

    The worker that has just come back is spared: one that is killed as soon as it serves is rightly waited
    for longer and longer.
    """
    over = threading.Event()
    lock = threading.Lock()
    succeeded: list[tuple[float, int]] = []
    failed: list[InferenceServerException] = []

    def load() -> None:
        with client_of(shared) as client:
            while not over.is_set():
                begun = time.monotonic()
                try:
                    pid = ask(client, "many")
                except InferenceServerException as error:
                    with lock:
                        failed.append(error)
                else:
                    with lock:
                        succeeded.append((begun, pid))

    def three() -> list[int] | None:
        if of_model(scrape(shared.metrics_url), "many", "conch_workers", state="serving") != 3:
            return None
        # One that was killed may still be there for a moment, and be counted as serving.
        workers = [each for each in workers_of(shared) if each.pid not in killed_pids]
        workers.sort(key=psutil.Process.create_time)
        return [each.pid for each in workers] if len(workers) == 3 else None

    def answered_after(moment: float) -> int | None:
        """The worker of the first answer to a request that began after a moment."""
        with lock:
            return next((pid for begun, pid in succeeded if begun > moment), None)

    chance = random.Random(6)
    threads = [threading.Thread(target=load) for _ in range(4)]
    at_once = 0
    killed_pids: set[int] = set()
    with loaded(shared, "many"):
        for thread in threads:
            thread.start()
        try:
            for _ in range(kills):
                workers = eventually(three, "three workers")
                pid = chance.choice(workers[:2])
                killed_pids.add(pid)
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
                after = eventually(partial(answered_after, killed), "later requests are answered")
                at_once += after in workers
        finally:
            over.set()
            for thread in threads:
                thread.join(WAIT_S)
    assert at_once > kills // 2  # most find another worker, and wait for no new one
    assert {refusal(error)[0] for error in failed} <= {"UNAVAILABLE"}
    assert [text for text in map(refusal, failed) if "was killed by signal 9 (SIGKILL)" not in text[1]] == []
    assert len(failed) <= kills  # each worker runs one request at a time
    assert len(succeeded) > kills


def test_workers_end_with_their_server(repository: Path, tmp_path: Path) -> None:
    """Also one that hangs in C code and holds the interpreter's lock."""
    with serving_process(repository) as server:  # with all models
        workers = workers_of(server)
        assert len(workers) == 6
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


@pytest.mark.parametrize("cycles", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_nothing_is_left_of_workers_that_were_unloaded(
    client: Client, shared: ServerProcess, cycles: int
) -> None:
    process = psutil.Process(shared.process.pid)
    other = ask(client)

    def cycle(kill: bool) -> None:
        client.load_model("many")
        ask(client, "many", {"do": "spawn"})
        if kill:
            for worker in workers_of(shared):
                if worker.pid != other and worker.is_running():
                    worker.kill()
        client.unload_model("many")
        eventually(lambda: [worker.pid for worker in workers_of(shared)] == [other], "its workers have ended")

    def held() -> tuple[int, int]:
        return process.num_fds(), process.num_threads()

    cycle(False)
    before = held()
    for number in range(cycles):
        cycle(number % 2 == 0)
    eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "nothing is left")


def test_the_crash_report(client: Client, shared: ServerProcess) -> None:
    pid = ask(client)
    with pytest.raises(InferenceServerException):
        client.infer(
            "hazards",
            [tensor("IN", np.array([1], np.int32), "INT32")],
            request_id="the last one",
            parameters={"do": "crash"},
            client_timeout=WAIT_S,
        )
    ask(client)
    reports = [line for line in shared.logs() if f"(pid {pid}) died" in line["message"]]
    assert [report["level"] for report in reports] == ["error"]
    message = reports[0]["message"]
    assert message.startswith(
        f"worker of 'hazards_0_0' (pid {pid}) died. Its process was killed by signal 11 (SIGSEGV).\n"
        f"requests in flight: 1, with the ids 'the last one'\nexecuting for: "
    )
    assert "Fatal Python error: Segmentation fault" in message
    assert "in _do\n" in message
