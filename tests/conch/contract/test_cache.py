"""The response cache as clients see it, and a server whose Redis comes and goes."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.contract_server import CASTER, CASTER_CONFIG, CASTER_TYPES
from tests.support.redis_server import RedisServer, redis_server, silent_server
from tests.support.server_fixtures import server_fixture
from tests.support.servers import (
    client_of,
    eventually,
    probe,
    probe_inputs,
    serving,
    serving_process,
    started,
    tensor,
    write_model,
    write_probe,
)
from tritonclient.utils import InferenceServerException

CACHED = "response_cache { enable: true }"
BATCHED = "dynamic_batching { } " + CACHED
SIZE = 1_000_000


def ttl(seconds: str) -> str:
    return f'parameters {{ key: "CONCH_CACHE_TTL" value {{ string_value: "{seconds}" }} }} {BATCHED}'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("cached")
    write_probe(repository, "probe", BATCHED)
    write_probe(repository, "plain", CACHED)
    write_probe(repository, "short", ttl("0.3"))
    write_probe(
        repository,
        "priorities",
        f"dynamic_batching {{ priority_levels: 2 default_priority_level: 1 }} {CACHED}",
    )
    write_model(repository, "caster", CASTER_CONFIG + CACHED, {"model.py": CASTER})
    return repository


server = server_fixture(flags=[f"--cache-config=local,size={SIZE}"])


class Counts:
    """Growth of a model's counters."""

    def __init__(self, client: triton.InferenceServerClient, model: str) -> None:
        self._client = client
        self._model = model
        self._before = self._read()

    def __call__(self) -> dict[str, int]:
        """By name; those that did not grow are left out."""
        now = self._read()
        return {name: now[name] - was for name, was in self._before.items() if now[name] != was}

    def _read(self) -> dict[str, int]:
        (stats,) = self._client.get_inference_statistics(self._model).model_stats
        counts = {name.name: 0 for name in stats.inference_stats.DESCRIPTOR.fields}
        counts |= {name.name: value.count for name, value in stats.inference_stats.ListFields()}
        return counts | {"inferences": stats.inference_count, "executions": stats.execution_count}


RUN = {
    "queue": 1,
    "compute_input": 1,
    "compute_infer": 1,
    "compute_output": 1,
    "inferences": 1,
    "executions": 1,
}
MISSED = {"success": 1, "cache_miss": 1, **RUN}
HIT = {"success": 1, "cache_hit": 1, "queue": 1}


@pytest.mark.parametrize("model", ["probe", "plain"])
def test_a_hit_is_the_same_answer_with_a_new_id(client: triton.InferenceServerClient, model: str) -> None:
    counts = Counts(client, model)
    first = client.infer(model, probe_inputs(11.0), request_id="one", model_version="1")
    assert counts() == MISSED
    counts = Counts(client, model)
    second = client.infer(model, probe_inputs(11.0), request_id="two")
    assert counts() == HIT
    assert (first.get_response().id, second.get_response().id) == ("one", "two")
    answers = [result.get_response() for result in (first, second)]
    for answer in answers:
        answer.id = ""
    assert answers[0] == answers[1]
    assert json.loads(second.as_numpy("SEEN")[0, 0])["ids"] == ["one"], "the model has not seen the second"


def test_requests_that_differ_get_their_own_answers(client: triton.InferenceServerClient) -> None:
    """Triton's key has bytes only: shapes and parameters would get each other's answers."""
    counts = Counts(client, "probe")
    for shape in ((1, 4), (2, 2), (4, 1)):
        result = client.infer("probe", probe_inputs(12.0, shape))
        assert result.as_numpy("OUT").shape == shape
    assert probe(client, 12.0, parameters={"p": "x"})["parameters"] == {"p": "x"}
    assert probe(client, 12.0, parameters={"p": "y"})["parameters"] == {"p": "y"}
    assert counts()["cache_miss"] == 5
    assert probe(client, 12.0, parameters={"p": "x"})["parameters"] == {"p": "x"}
    assert counts()["cache_hit"] == 1


def test_priorities_and_timeouts_make_no_difference(client: triton.InferenceServerClient) -> None:
    counts = Counts(client, "priorities")
    for settings in ({}, {"priority": 1}, {"priority": 2, "timeout": 10**7}):
        probe(client, 13.0, "priorities", **settings)
    assert counts()["cache_hit"] == 2


def test_outputs_and_classes(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("IN", np.array([[3, 1, 2, 0]], np.float32))]
    wishes = [
        None,
        [triton.InferRequestedOutput("OUT")],
        [triton.InferRequestedOutput("SEEN")],
        [triton.InferRequestedOutput("OUT", class_count=2)],
        [triton.InferRequestedOutput("OUT", class_count=3), triton.InferRequestedOutput("SEEN")],
    ]
    counts = Counts(client, "probe")
    fresh = [client.infer("probe", inputs, outputs=wish).get_response() for wish in wishes]
    assert counts()["cache_miss"] == len(wishes)
    found = [client.infer("probe", inputs, outputs=wish).get_response() for wish in wishes]
    assert counts()["cache_hit"] == len(wishes)
    assert fresh == found
    assert [len(answer.outputs) for answer in found] == [2, 1, 1, 1, 2]
    result = client.infer("probe", inputs, outputs=wishes[3])
    assert result.as_numpy("OUT").tolist() == [[b"3.000000:0", b"2.000000:2"]]
    both = [triton.InferRequestedOutput(name) for name in ("SEEN", "OUT")]
    assert client.infer("probe", inputs, outputs=both).get_response() == fresh[0]
    assert counts()["executions"] == len(wishes)


@pytest.mark.parametrize("kind", CASTER_TYPES)
def test_every_datatype(client: triton.InferenceServerClient, kind: str) -> None:
    datatype = "BYTES" if kind == "STRING" else kind
    if kind == "STRING":
        array = np.array([b"", b"\0\xff", "ä".encode()], object)
    else:
        array = np.array([1, 0, 1]).astype(triton.triton_to_np_dtype(datatype))
    counts = Counts(client, "caster")
    for _ in range(2):
        result = client.infer("caster", [tensor(kind, array, datatype)])
        assert result.as_numpy("O" + kind).tolist() == array.tolist()
    assert (counts()["cache_hit"], counts()["executions"]) == (1, 1)


def test_errors_are_not_kept(client: triton.InferenceServerClient) -> None:
    counts = Counts(client, "probe")
    for orders in ({"do": "raise"}, {"error": "UNSUPPORTED"}):
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="told to"):
                client.infer("probe", probe_inputs(14.0), parameters=orders)
    assert counts() == {"fail": 4, "cache_miss": 4}


def test_refused_requests_stay_refused(client: triton.InferenceServerClient) -> None:
    probe(client, 15.0)
    with pytest.raises(InferenceServerException, match="unexpected inference output 'X' for model 'probe'"):
        client.infer("probe", probe_inputs(15.0), outputs=[triton.InferRequestedOutput("X")])
    with pytest.raises(InferenceServerException, match="batch-size must be <= 8"):
        client.infer("probe", probe_inputs(15.0, (9, 1)))


def test_bypass_and_refresh(client: triton.InferenceServerClient) -> None:
    def ask(request_id: str, order: str | None = None) -> str:
        parameters = {"conch_cache": order} if order else None
        seen = probe(client, 16.0, request_id=request_id, parameters=parameters)
        return str(seen["ids"][0])

    counts = Counts(client, "probe")
    assert [ask("a", "bypass"), ask("b"), ask("c"), ask("d", "refresh"), ask("e"), ask("f", "bypass")] == [
        "a", "b", "b", "d", "d", "f",
    ]  # fmt: skip
    assert {name: counts()[name] for name in ("success", "cache_hit", "cache_miss", "executions")} == {
        "success": 6, "cache_hit": 2, "cache_miss": 1, "executions": 4,
    }  # fmt: skip
    with pytest.raises(
        InferenceServerException, match="'conch_cache' must be 'bypass' or 'refresh', got 'no'"
    ):
        ask("g", "no")


def test_what_is_larger_than_the_cache_is_answered(
    caplog: pytest.LogCaptureFixture, client: triton.InferenceServerClient
) -> None:
    counts = Counts(client, "probe")
    large = np.ones((1, SIZE // 4), np.float32)
    for _ in range(2):
        assert (client.infer("probe", [tensor("IN", large)]).as_numpy("OUT") == large).all()
    assert counts()["cache_miss"] == 2
    eventually(lambda: caplog.text.count("Failed to insert key [") == 1, "it is logged once")


def test_cached_responses_end_in_time(client: triton.InferenceServerClient) -> None:
    def seen(request_id: str) -> str:
        return str(probe(client, 17.0, "short", request_id=request_id)["ids"][0])

    start = time.monotonic()
    assert seen("one") == "one"
    again = seen("two")
    assert again == "one" or time.monotonic() - start > 0.25
    eventually(lambda: seen("three") == "three", "it ends")
    assert time.monotonic() - start > 0.25


def test_streams_keep_their_order(client: triton.InferenceServerClient, tmp_path: Path) -> None:
    """A hit overtakes a request that runs, but not on its stream."""
    probe(client, 18.0)
    started_file, go = tmp_path / "started", tmp_path / "go"
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append((result, error)))
    client.async_stream_infer(
        "probe",
        probe_inputs(19.0),
        request_id="slow",
        parameters={"started": str(started_file), "wait_for": str(go)},
    )
    eventually(started_file.exists, "it runs")
    counts = Counts(client, "probe")
    client.async_stream_infer("probe", probe_inputs(18.0), request_id="hit")
    eventually(lambda: counts() == HIT, "the hit is found")
    assert not answers
    go.touch()
    client.stop_stream()
    assert [(result.get_response().id, error) for result, error in answers] == [("slow", None), ("hit", None)]


def test_a_reloaded_model_gives_its_own_answers(tmp_path: Path) -> None:
    directory = write_probe(tmp_path, "probe", BATCHED)
    flags = ["--model-control-mode=explicit", "--load-model=*", f"--cache-config=local,size={SIZE}"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        assert probe(client, 1.0, request_id="old")["ids"] == ["old"]
        assert probe(client, 1.0, request_id="x")["ids"] == ["old"]
        os.utime(directory / "1" / "model.py", (1, 1))
        client.load_model("probe")
        assert probe(client, 1.0, request_id="new")["ids"] == ["new"]
        assert probe(client, 1.0, request_id="x")["ids"] == ["new"]
        client.unload_model("probe")
        with pytest.raises(InferenceServerException, match="'probe'"):
            probe(client, 1.0)


def test_without_a_cache_the_config_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_probe(tmp_path, "probe", BATCHED)
    with serving(tmp_path) as server, client_of(server) as client:
        for request_id in ("one", "two"):
            assert probe(client, 1.0, request_id=request_id)["ids"] == [request_id]
        assert client.get_model_config("probe").config.response_cache.enable
        text = "model 'probe' enables the response cache, but the server has none"
        eventually(lambda: text in caplog.text, "it is logged")


@pytest.mark.process
@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            CACHED + " model_transaction_policy { decoupled: true }",
            "Response Cache does not currently support model probe with 'decoupled' transaction policy. "
            "Please disable the response cache.",
        ),
        (
            CACHED + " sequence_batching { }",
            "Response Cache does not currently support model probe with sequence batching scheduler. Please "
            "disable the response cache.",
        ),
        (ttl("never"), "parameter 'CONCH_CACHE_TTL' of model 'probe' must be a number of seconds above 0"),
    ],
)
def test_models_that_can_not_be_cached(tmp_path: Path, extra: str, text: str) -> None:
    write_probe(tmp_path, "probe", extra)
    flags = [f"--model-repository={tmp_path}", "--grpc-port=0", f"--cache-config=local,size={SIZE}"]
    with started(*flags) as server:
        assert server.wait() == 1
        assert text in server.errors


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--cache-config=local,size=1", "--cache-config=redis,host=x"],
            "error: creating server: Invalid argument - found multiple cache configurations, but only a "
            "single cache is currently supported",
        ),
        (
            ["--cache-config=local,ttl=1"],
            "error: creating server: Invalid argument - Failed to initialize LocalCache: config didn't "
            "contain a valid 'size' field.",
        ),
        (
            ["--cache-config=nope,size=1"],
            "error: creating server: Invalid argument - unable to find cache 'nope'",
        ),
        (
            ["--cache-config=local"],
            "No cache specified. --cache-config option format is <cache name>,<setting>=",
        ),
        (
            ["--cache-config=local,size=1", "--response-cache-byte-size=1"],
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided.",
        ),
        (
            ["--cache-config=redis,host=127.0.0.1", "--cache-config=redis,port=1"],
            "error: creating server: Internal - Failed to initialize RedisCache: ",
        ),
    ],
)
def test_flags_that_end_the_start(tmp_path: Path, flags: list[str], text: str) -> None:
    with started(f"--model-repository={tmp_path}", "--grpc-port=0", *flags) as server:
        assert server.wait() == 1
        assert text in server.errors
        assert "Traceback" not in server.errors


@pytest.mark.process
def test_the_old_flag_is_a_local_cache(tmp_path: Path) -> None:
    write_probe(tmp_path, "probe", BATCHED)
    flags = [f"--response-cache-byte-size={SIZE}", f"--cache-directory={tmp_path}"]
    with serving_process(tmp_path, flags=flags) as server, client_of(server) as client:
        assert [probe(client, 1.0, request_id=name)["ids"] for name in ("one", "two")] == [["one"]] * 2
        text = (
            f"Warning: '--response-cache-byte-size' has been deprecated! .*'--cache-config=local,size={SIZE}'"
        )
        eventually(lambda: re.search(text, server.errors), "it is logged")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as redis:
        yield redis


def redis_flags(port: int, **settings: object) -> list[str]:
    given = {"host": "127.0.0.1", "port": port, **settings}
    return [f"--cache-config=redis,{name}={value}" for name, value in given.items()]


def wait_entries(redis: RedisServer, entries: int) -> None:
    with redis.client() as client:
        eventually(lambda: client.dbsize() == entries, f"{entries} entries")


@pytest.mark.process
def test_servers_share_a_redis(redis: RedisServer, tmp_path: Path) -> None:
    """Same files, same answers: from server to server, and beyond a restart."""
    write_probe(tmp_path, "probe", ttl("600"))
    wait_entries(redis, 0)
    flags = redis_flags(redis.port)
    with serving_process(tmp_path, flags=flags) as one, client_of(one) as client:
        with serving_process(tmp_path, flags=flags) as two, client_of(two) as other:
            assert probe(client, 1.0, request_id="one")["ids"] == ["one"]
            wait_entries(redis, 1)
            counts = Counts(other, "probe")
            assert probe(other, 1.0, request_id="two")["ids"] == ["one"]
            assert counts() == HIT
        with redis.client() as look:
            (key,) = look.keys()
            assert 0 < look.pttl(key) <= 600_000
    (tmp_path / "probe" / "1" / "more.txt").write_text("another model")
    with serving_process(tmp_path, flags=flags) as three, client_of(three) as client:
        assert probe(client, 1.0, request_id="three")["ids"] == ["three"]


@pytest.mark.process
def test_a_redis_that_goes_away_is_done_without(tmp_path: Path) -> None:
    write_probe(tmp_path, "probe", BATCHED)
    with (
        redis_server() as redis,
        serving_process(tmp_path, flags=redis_flags(redis.port)) as server,
        client_of(server) as client,
    ):
        assert probe(client, 1.0, request_id="one")["ids"] == ["one"]
        wait_entries(redis, 1)
        assert probe(client, 1.0, request_id="two")["ids"] == ["one"]
        redis.stop()
        for number in range(20):
            name = str(number)
            assert probe(client, 1.0, request_id=name)["ids"] == [name]
        out = "the response cache is out of order"
        eventually(lambda: server.errors.count(out) == 1, "it is logged once")
        redis.start()
        counts = Counts(client, "probe")

        def hit() -> bool:
            probe(client, 1.0)
            return "cache_hit" in counts()

        eventually(hit, "it is used again")
        again = "the response cache answers again"
        eventually(lambda: server.errors.count(again) == 1, "it is logged once")


@pytest.mark.process
def test_a_redis_that_hangs_delays_nobody_for_long(tmp_path: Path) -> None:
    """Redis's port is taken over by a server that says nothing."""
    write_probe(tmp_path, "probe", BATCHED)
    with redis_server() as redis:
        flags = redis_flags(redis.port, socket_timeout=200)
        with serving_process(tmp_path, flags=flags) as server, client_of(server) as client:
            with redis.client() as entries:

                def kept() -> bool:
                    probe(client, 1.0)
                    return bool(entries.dbsize())

                eventually(kept, "an answer is kept")  # a busy machine may not within the time limit
            redis.stop()
            taken: list[socket.socket] = []
            with silent_server(redis.port, taken):
                start = time.monotonic()
                for number in range(30):
                    probe(client, float(number))
                # Without the pause of a second after an error each of them would wait for an answer.
                assert len(taken) <= 2 * (time.monotonic() - start + 1)
                text = "the response cache is out of order"
                eventually(lambda: text in server.errors, "it is logged")


@pytest.mark.process
def test_passwords_do_not_reach_the_log(redis: RedisServer, tmp_path: Path) -> None:
    write_probe(tmp_path, "probe", BATCHED)
    environment = {"TRITONCACHE_REDIS_PASSWORD": "from-environment"}
    for settings in ({"password": "from-flag"}, {}):
        with serving_process(
            tmp_path, flags=[*redis_flags(redis.port, **settings), "--log-verbose=1"], environment=environment
        ) as server:
            eventually(lambda: "response cache 'redis'" in server.errors, "it is logged")
            assert "from-" not in server.errors + server.output
