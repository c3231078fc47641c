"""Features of models together: sequences, caches, limits, order and ensembles."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.conch.contract.test_batching import Blocked, fill, probe_request, send
from tests.conch.contract.test_cache import BATCHED, CACHED, HIT, SIZE, Counts
from tests.conch.contract.test_rate_limit import rated
from tests.conch.contract.test_sequences import DECOUPLED, ITERATIVE, refusal
from tests.support.ensembles import ensemble_config, plain, request, spied, write_ensembles
from tests.support.ensembles import python_config as spy_config
from tests.support.sequence_models import COUNTDOWN, ECHOES, IO, LONG, SUMS, python_config, write_sums
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    eventually,
    past_deadline,
    probe,
    tensor,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client

ALONE = '''

    def execute(self, requests):
        """Fails if another model that shares the file runs."""
        import os

        path = os.path.join(os.path.dirname(__file__), "..", "..", "somebody-runs")
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        try:
            return self.run(requests)
        finally:
            os.unlink(path)
'''
ADD = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() + %d)])
            for request in requests
        ]
"""
BOUND = 2
ORDERED = "dynamic_batching { preserve_ordering: true } instance_group { count: 2 kind: KIND_CPU }"


def alone(code: str) -> str:
    """A model's code that notices when another model runs at the same time."""
    return code.replace("def execute(", "def run(") + ALONE


def write_add(repository: Path, name: str, number: int = 1) -> Path:
    """Writes a model that adds a number to IN."""
    return write_model(repository, name, spy_config(), {"model.py": ADD % number})


def write_sequences(repository: Path) -> None:
    """Models with sequences, and ensembles with them inside."""
    write_sums(repository, "sums", "oldest")
    write_sums(repository, "narrow", "direct", batch=1)
    write_probe(repository, "relay")
    for first in ("spy", "relay"):
        steps = [plain(first, "X", "t"), plain("sums", "t", "Y")]
        write_model(repository, f"{first} and sums", ensemble_config(steps, batch=4, dims="1"))
    steps = [("spy and sums", {"X": "X"}, {"Y": "t"}), plain("add", "t", "Y")]
    write_model(repository, "around", ensemble_config(steps, batch=4, dims="1"))
    steps = [("add", {"IN": "X"}, {"OUT": "t"}), plain("narrow", "t", "Y")]
    write_model(repository, "narrowed", ensemble_config(steps, batch=1, dims="1"))
    steps = [("narrowed", {"X": "X"}, {"Y": "t"}), plain("spy", "t", "Y")]
    write_model(repository, "narrowed twice", ensemble_config(steps, batch=1, dims="1"))
    config = python_config("oldest", more=LONG, io=IO, extra=DECOUPLED)
    write_model(repository, "echoes", config, {"model.py": ECHOES})
    steps = [plain("echoes", "X", "t"), plain("add", "t", "Y")]
    write_model(repository, "echoing", ensemble_config(steps, batch=4, dims="1"))
    for number, strategy in enumerate(("direct", "oldest"), 1):
        config = python_config(strategy, more=LONG, extra=rated(count=number))
        write_model(repository, f"rated {strategy}", config, {"model.py": alone(SUMS)})
        config = python_config(strategy, more=ITERATIVE, io=IO, extra=rated())
        write_model(repository, f"rated countdown {strategy}", config, {"model.py": alone(COUNTDOWN)})


def write_others(repository: Path) -> None:
    """Models with caches, queues and orders, and ensembles with them inside."""
    kept = [spied("spy", "X", "t", "S1"), plain("spy2", "t", "Y")]
    write_model(repository, "kept", ensemble_config(kept, ["Y", "S1"], extra=CACHED))
    write_probe(repository, "cached", BATCHED)
    steps = [("cached", {"IN": "X"}, {"OUT": "t"}), plain("spy", "t", "Y")]
    write_model(repository, "over cached", ensemble_config(steps))
    steps = [("each", {"X": "X"}, {"Y": "t"}), plain("spy2", "t", "Y")]
    write_model(repository, "over each", ensemble_config(steps))
    write_probe(repository, "ordered", ORDERED)
    write_model(repository, "over ordered", ensemble_config([plain("ordered", "X", "Y")]))
    bound = f'parameters {{ key: "CONCH_MAX_QUEUE_SIZE" value {{ string_value: "{BOUND}" }} }}'
    policy = f"default_queue_policy {{ max_queue_size: {BOUND} }}"
    for name, extra in (
        ("short", f"dynamic_batching {{ }} {bound}"),
        ("policy", f"dynamic_batching {{ {policy} }}"),
    ):
        write_probe(repository, name, extra)
        write_model(
            repository, f"over {name}", ensemble_config([plain("add", "X", "t"), plain(name, "t", "Y")])
        )
        steps = [(f"over {name}", {"X": "X"}, {"Y": "t"}), plain("spy", "t", "Y")]
        write_model(repository, f"over over {name}", ensemble_config(steps))
    write_probe(repository, "waits")
    steps = [("waits", {"IN": "X"}, {"OUT": "t"}), plain("add", "t", "Y")]
    write_model(repository, "waiting", ensemble_config(steps))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of all of them."""
    repository = tmp_path_factory.mktemp("combinations")
    write_ensembles(repository)
    write_add(repository, "add")
    write_sequences(repository)
    write_others(repository)
    return repository


server = server_fixture(
    flags=[
        *LOAD_ALL,
        "--rate-limit=execution_count",
        f"--cache-config=local,size={SIZE}",
    ]
)
"""A server with a cache and with rate limits."""


def ask(client: Client, model: str, value: float = 1.0, name: str = "X", **more: Any) -> float:
    """Sends one number to a model, usually an ensemble; gives the one it answers with."""
    inputs = [tensor(name, np.array([[value]], np.float32))]
    result = client.infer(model, inputs, client_timeout=more.pop("client_timeout", WAIT_S), **more)
    return float(result.as_numpy("Y" if name == "X" else "OUT").item())


def step(client: Client, model: str, sequence: int, value: float, flags: str = "", **more: Any) -> float:
    """Sends one number of a sequence; the flags are of `S` for start and `E` for end."""
    more |= {"sequence_id": sequence, "sequence_start": "S" in flags, "sequence_end": "E" in flags}
    return ask(client, model, value, **more)


class Stream:
    """A stream whose requests have an id each; `answers` are by id, in the order they came."""

    def __init__(self, client: Client) -> None:
        self.answers: dict[str, list[float]] = {}
        self._client = client
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open = 0
        client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def send(self, model: str, value: Any, request_id: str, flags: str = "", **more: Any) -> None:
        """Sends a request."""
        self._open += 1
        self._client.async_stream_infer(
            model,
            [tensor("X", np.array(value, np.float32))],
            request_id=request_id,
            sequence_start="S" in flags,
            sequence_end="E" in flags,
            enable_empty_final_response=True,
            **more,
        )

    def finish(self) -> dict[str, list[float]]:
        """Waits for all answers and closes the stream; an error fails the test."""
        try:
            while self._open:
                result, error = self._arrived.get(timeout=WAIT_S)
                assert error is None, error
                response = result.get_response()
                values = self.answers.setdefault(response.id, [])
                if response.outputs:
                    values.append(float(result.as_numpy("Y").item()))
                self._open -= response.parameters["triton_final_response"].bool_param
        finally:
            self._client.stop_stream(cancel_requests=self._open > 0)  # or it waits for what never comes
        return self.answers


FIRSTS = pytest.mark.parametrize(
    ("model", "added"), [("spy and sums", 1), ("relay and sums", 0), ("around", 1)]
)


class TestSequencesInEnsembles:
    @FIRSTS
    def test_sequences_add_up(self, client: Client, model: str, added: int) -> None:
        once = int(model == "around")
        for number, flags in enumerate(("S", "", "E"), 1):
            for sequence in (1, 2):
                assert step(client, model, sequence, sequence, flags) == number * (sequence + added) + once
        status, text = refusal(partial(step, client, model, 1, 1.0))
        assert status == "INVALID_ARGUMENT"
        assert text.startswith("in ensemble ")
        assert text.endswith(
            "inference request for sequence 1 to model 'sums' must specify the START flag on the first "
            "request of the sequence"
        )
        assert step(client, model, 1, 5, "SE") == 5 + added + once

    @FIRSTS
    def test_requests_of_a_stream_stay_in_their_order(
        self, server: AnyServer, model: str, added: int
    ) -> None:
        """Whichever threads take a request from step to step."""
        once = int(model == "around")
        length = 60
        with client_of(server) as client:
            stream = Stream(client)
            for number in range(length):
                for sequence in (1, 2, 3):
                    flags = {0: "S", length - 1: "E"}.get(number, "")
                    value = sequence * (number + 1)
                    stream.send(model, [[value]], f"{sequence} {number}", flags, sequence_id=sequence)
            answers = stream.finish()
        for sequence in (1, 2, 3):
            sums = accumulate(sequence * (number + 1) + added for number in range(length))
            assert [answers[f"{sequence} {number}"] for number in range(length)] == [
                [sum + once] for sum in sums
            ]

    def test_the_same_sequence_inside_and_outside(self, client: Client) -> None:
        """It is the model that has it, whichever way its requests come."""
        assert step(client, "spy and sums", 5, 1, "S") == 2
        assert ask(client, "sums", 10, name="IN", sequence_id=5) == 12
        assert step(client, "relay and sums", 5, 1) == 13
        assert step(client, "around", 5, 1, "E") == 16

    def test_decoupled_sequences(self, server: AnyServer) -> None:
        with client_of(server) as client:
            stream = Stream(client)
            for number, flags in enumerate(("S", "", "E")):
                for sequence in (1, 2):
                    stream.send("echoing", [[sequence]], f"{sequence} {number}", flags, sequence_id=sequence)
            answers = stream.finish()
        assert answers == {f"{s} {n}": [s * (n + 1) + 1] * 2 for s in (1, 2) for n in range(3)}

    def test_a_failing_step_leaves_the_sequence(self, client: Client) -> None:
        assert step(client, "relay and sums", 6, 1, "S") == 1
        failing = partial(step, client, "relay and sums", 6, -1)
        assert refusal(failing)[0] == "INTERNAL", "the sequence's model"
        before = partial(step, client, "spy and sums", 6, 1, parameters={"error_spy": "UNAVAILABLE"})
        assert refusal(before) == ("UNAVAILABLE", "in ensemble 'spy and sums', told to")
        assert step(client, "relay and sums", 6, 1, "E") == 2, "has seen neither"

    def test_a_deadline_in_the_backlog(self, client: Client) -> None:
        """It reaches the sequence's queue through two ensembles."""
        counts = Counts(client, "narrow")
        assert step(client, "narrowed twice", 1, 1, "S") == 3
        waiting = partial(step, client, "narrowed twice", 2, 1, "S")
        refused = past_deadline(
            lambda seconds: refusal(partial(waiting, client_timeout=seconds)), lambda: counts().get("fail")
        )
        assert "Deadline Exceeded" in refused[1], "and it has left the backlog"
        assert step(client, "narrowed twice", 1, 1, "E") == 5
        assert step(client, "narrowed", 2, 7, "SE") == 8


class TestCaches:
    def test_a_hit_runs_no_steps(self, client: Client) -> None:
        parts = [Counts(client, name) for name in ("spy", "spy2")]
        whole = Counts(client, "kept")
        inputs = [tensor("X", np.full((2, 3), 5, np.float32))]
        first, second = (client.infer("kept", inputs, request_id=name) for name in "ab")
        assert [count()["success"] for count in parts] == [1, 1]
        counted = whole()
        assert (counted["success"], counted["cache_miss"], counted["cache_hit"]) == (2, 1, 1)
        assert (first.get_response().id, second.get_response().id) == ("a", "b")
        for name in ("Y", "S1"):
            assert first.as_numpy(name).tolist() == second.as_numpy(name).tolist()
        assert list(second.as_numpy("Y").ravel()) == [7.0] * 6
        whole = Counts(client, "kept")
        client.infer("kept", inputs, parameters={"conch_cache": "refresh"})
        assert [count()["success"] for count in parts] == [2, 2]

    def test_failures_of_steps_are_not_kept(self, client: Client) -> None:
        counts = Counts(client, "kept")
        for _ in range(2):
            failing = partial(ask, client, "kept", 6, parameters={"error_spy2": "UNAVAILABLE"})
            assert refusal(failing) == ("UNAVAILABLE", "in ensemble 'kept', told to")
        assert (counts()["cache_miss"], counts()["fail"]) == (2, 2)
        assert "cache_hit" not in counts()

    def test_a_cached_step(self, client: Client) -> None:
        step_counts, rest, whole = (Counts(client, name) for name in ("cached", "spy", "over cached"))
        assert [ask(client, "over cached", 8.0) for _ in range(3)] == [9.0] * 3
        assert (step_counts()["cache_miss"], step_counts()["cache_hit"]) == (1, 2)
        assert (step_counts()["executions"], rest()["success"]) == (1, 3)
        assert whole()["success"] == 3
        assert ask(client, "cached", 8.0, name="IN") == 8.0
        assert step_counts()["cache_hit"] == 2, "the ensemble has asked for one output, this for both"

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_reloaded_step_has_new_answers(self, client: Client, repository: Path, depth: int) -> None:
        leaf = f"leaf {depth}"
        names = [leaf] + [f"level {depth} {number}" for number in range(depth)]
        write_add(repository, leaf)
        for inner, name in pairwise(names):
            ends = ("IN", "OUT") if inner == leaf else ("X", "Y")
            config = ensemble_config([(inner, {ends[0]: "X"}, {ends[1]: "Y"})], extra=CACHED)
            write_model(repository, name, config)
        top = names[-1]
        client.load_model(top)
        counts = Counts(client, leaf)
        assert [ask(client, top, 1.0) for _ in range(2)] == [2.0] * 2
        assert counts()["success"] == 1
        write_add(repository, leaf, 1000)
        client.load_model(leaf)
        assert [ask(client, top, 1.0) for _ in range(2)] == [1001.0] * 2
        client.unload_model(leaf)
        text = refusal(partial(ask, client, top, 1.0))[1]
        assert f"'{top}' has no available versions" in text, "what is kept does not hide that it is gone"
        client.load_model(leaf)
        assert ask(client, top, 1.0) == 1001.0

    def test_more_instances_keep_what_is_kept(
        self, client: Client, raw: RawClient, repository: Path, tmp_path: Path
    ) -> None:
        def write(count: int) -> None:
            write_probe(repository, "grown", f"{BATCHED} instance_group {{ kind: KIND_CPU count: {count} }}")

        def shown() -> int:
            (group,) = client.get_model_config("grown").config.instance_group
            return int(group.count)

        write(1)
        model = repository / "grown" / "1" / "model.py"
        written = model.stat().st_mtime_ns
        client.load_model("grown")
        assert probe(client, model="grown", request_id="kept")["ids"] == ["kept"]
        config = repository / "grown" / "config.pbtxt"
        for before, after in ((1, 2), (2, 1)):
            config.write_text(config.read_text().replace(f"count: {before}", f"count: {after}"))
            client.load_model("grown")
            assert shown() == after
            counts = Counts(client, "grown")
            assert probe(client, model="grown")["ids"] == ["kept"]
            assert counts() == HIT
            begun = [tmp_path / f"{after} {number}" for number in range(after)]
            go = tmp_path / f"go {after}"
            calls = []
            for path in begun:  # one after the other, so that they are no batch
                calls.append(send(raw, probe_request("grown", started=str(path), wait_for=str(go))))
                eventually(path.exists, "every instance runs, at the same time")
            go.touch()
            assert all(call.result().model_name == "grown" for call in calls)
        assert model.stat().st_mtime_ns == written
        (stats,) = client.get_inference_statistics("grown").model_stats
        assert stats.inference_stats.success.count == 6, "counted from the first load on"


class TestDecoupledStepsOfNestedEnsembles:
    def test_answers_come_one_by_one(self, server: AnyServer) -> None:
        with client_of(server) as client:
            stream = Stream(client)
            wanted = {}
            for number in range(10):
                values = list(range(number, number + number % 4))
                stream.send("over each", [values], str(number))
                wanted[str(number)] = [value + 2.0 for value in values]
            assert stream.finish() == wanted

    def test_what_goes_wrong_inside(self, client: Client) -> None:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = [tensor("X", np.array([[1, 2, 3]], np.float32))]
        client.async_stream_infer("over each", inputs, parameters={"error_many": 0})
        _, error = answers.get(timeout=WAIT_S)
        assert error.message() == "in ensemble 'over each', in ensemble 'each', told to"
        client.stop_stream()


class TestOrder:
    def test_an_ensemble_keeps_the_order_of_its_step(
        self, raw: RawClient, client: Client, signal_files: tuple[Path, Path]
    ) -> None:
        blocked = Blocked(raw, "ordered", signal_files)
        counts = Counts(client, "ordered")
        later = send(raw, request("over ordered", [[2.0]]))
        eventually(lambda: counts().get("success") == 1, "the second instance has run")
        assert not later.done()
        blocked.let_go()
        assert later.result().model_name == "over ordered"


@pytest.mark.parametrize("kind", ["rated", "rated countdown"])
def test_sequences_share_a_resource(client: Client, kind: str) -> None:
    """Two models, one at a time, many sequences: no two batches at once, and no sequence is forgotten."""

    def sums(sequence: int) -> list[float]:
        model = f"rated {('direct', 'oldest')[sequence % 2]}"
        flags = ["S", *[""] * 4, "E"]
        return [
            ask(client, model, sequence, name="IN", sequence_id=sequence, sequence_start=flag == "S",
                sequence_end=flag == "E")
            for flag in flags
        ]  # fmt: skip

    def countdown(number: int) -> list[float]:
        model = f"rated countdown {('direct', 'oldest')[number % 2]}"
        return [ask(client, model, 5 + number, name="IN") for _ in range(2)]

    with ThreadPoolExecutor(12) as pool:
        if kind == "rated":
            for sequence, values in enumerate(pool.map(sums, range(1, 25)), 1):
                assert values == [sequence * number for number in range(1, 7)]
        else:
            assert list(pool.map(countdown, range(12))) == [[0.0, 0.0]] * 12
    for strategy in ("direct", "oldest"):
        (stats,) = client.get_inference_statistics(f"{kind} {strategy}").model_stats
        assert stats.inference_stats.fail.count == 0


FULL = {
    "short": (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{BOUND} requests are waiting, the most the model's queue takes; "
        f"retry after a pause, a longer one each time",
    ),
    "policy": (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"),
}


class TestFullQueuesOfSteps:
    @pytest.mark.parametrize("model", FULL)
    def test_the_client_is_told_when_to_come_back(
        self, raw: RawClient, signal_files: tuple[Path, Path], model: str
    ) -> None:
        blocked = Blocked(raw, model, signal_files)
        waiting, _ = fill(raw, model, BOUND)
        code, text = FULL[model]
        for name in (f"over {model}", f"over over {model}"):
            message = request(name, [[1.0]])
            message.id = ""
            with pytest.raises(grpc.RpcError) as raised:
                raw.infer(message)
            assert raised.value.code() is code
            assert raised.value.details().endswith(f"in ensemble 'over {model}', {text}")
            trailing = dict(raised.value.trailing_metadata())
            assert 1 <= int(trailing["grpc-retry-pushback-ms"]) <= 10_000
            assert 1 <= int(trailing["retry-after"]) <= 10
            (answer,) = raw.stream([message])
            assert answer.error_message.endswith(text)
            assert 1 <= answer.infer_response.parameters["retry_after_ms"].int64_param <= 10_000
        blocked.let_go()
        assert all(call.result().model_name == model for call in waiting)


class TestDeadlines:
    def test_one_that_passes_in_a_step_begins_no_other(
        self, client: Client, signal_files: tuple[Path, Path]
    ) -> None:
        begun, go = signal_files
        whole, last = Counts(client, "waiting"), Counts(client, "add")
        orders = {"started": str(begun), "wait_for": str(go)}
        late = partial(ask, client, "waiting", parameters=orders)
        refused = past_deadline(lambda seconds: refusal(partial(late, client_timeout=seconds)), begun.exists)
        assert "Deadline Exceeded" in refused[1]
        eventually(lambda: whole().get("fail"), "it is over for the ensemble, while the step runs")
        go.touch()
        assert ask(client, "waiting", 3.0) == 4.0
        assert last()["success"] == 1, "that of the second request"
