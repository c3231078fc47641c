"""Servers that follow a store which hangs, is busy, or cuts off what it sends, while requests keep coming."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.support.emulators import Bucket, S3Emulator, put_tree, s3_emulator
from tests.support.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving
from tests.support.steered import Steering, answer_of

FAULTS = (Fault.HANG, Fault.BUSY, Fault.TRUNCATE, Fault.DROP, Fault.CORRUPT)
MODELS = ("m", "n")


@pytest.fixture(scope="module")
def s3(grpc_is_warm: None) -> Iterator[S3Emulator]:
    with s3_emulator() as running:
        yield running


@contextmanager
def asking(server: ServerProcess) -> Iterator[dict[str, list[int]]]:
    """Requests to all models during the block, none of which may fail; their answers."""
    stop = threading.Event()
    answers: dict[str, list[int]] = {name: [] for name in MODELS}
    errors: list[BaseException] = []

    def ask(name: str) -> None:
        with client_of(server) as client:
            try:
                while not stop.is_set():
                    answers[name].append(answer_of(client, name))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in (*MODELS, *MODELS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
        for each in answers.values():
            more = len(each) + 20
            eventually(partial(lambda each, more: len(each) > more or errors, each, more), "answers come")
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert errors == []


class Followed:
    """A repository in a store that a server follows."""

    def __init__(self, bucket: Bucket, proxy: FaultyProxy, path: Path) -> None:
        self._bucket = bucket
        self._steering = Steering(path)
        self._source = path / "source"
        self.proxy = proxy

    def publish(self, name: str, answer: int) -> None:
        """Writes a model, or has it answer with another number."""
        self._steering.write(self._source, name, 1, answer)
        put_tree(self._bucket, self._source / name, f"{name}/")


@contextmanager
def followed(s3: S3Emulator, path: Path) -> Iterator[tuple[Followed, ServerProcess]]:
    """Models in a bucket of their own, and a server in mode poll."""
    name = path.name.replace("_", "-").lower()
    with faulty_proxy(s3.port) as proxy:
        place = Followed(s3.bucket(name), proxy, path)
        for each in MODELS:
            place.publish(each, 1)
        flags = [
            f"--model-repository={s3.location(name, '', proxy.port)}",
            f"--model-cache-directory={path}/cache",
            "--model-control-mode=poll",
            "--repository-poll-secs=0.1",
            "--repository-settle-secs=0.2",
            "--storage-timeout-secs=1",
        ]
        with serving(flags=flags, environment=s3.environment()) as server:
            yield place, server


@pytest.mark.parametrize("fault", FAULTS)
def test_what_serves_goes_on_and_what_is_new_comes_later(
    s3: S3Emulator, tmp_path: Path, fault: Fault
) -> None:
    with followed(s3, tmp_path) as (place, server), asking(server) as answers:
        place.proxy.seen.clear()
        place.proxy.fail(fault)
        place.publish("m", 2)
        eventually(lambda: server.errors.count("failed to read model repository") >= 2, "it is noticed")
        with client_of(server) as client:
            assert [answer_of(client, name) for name in MODELS] == [1, 1]
            assert client.is_server_ready()
        place.proxy.heal()
        eventually(lambda: answers["m"][-1:] == [2], "what is new serves")
        assert "unloading it" not in server.errors
    assert answers["m"] == sorted(answers["m"])
    assert set(answers["n"]) == {1}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_can_not_be_fetched_come_later(s3: S3Emulator, tmp_path: Path, fault: Fault) -> None:
    """The listings are fine; the content of one file is not."""
    with followed(s3, tmp_path) as (place, server), asking(server) as answers:
        place.proxy.seen.clear()
        times = 1 if fault is Fault.CORRUPT else -1  # what always comes the same is what there is
        place.proxy.fail(fault, times=times, path="m/1/weights", method="GET")
        place.publish("m", 2)
        eventually(lambda: place.proxy.count("m/1/weights", "GET") >= 2, "the file is asked for")
        if times < 0:
            eventually(lambda: "failed to load 'm', what served before goes on" in server.errors, "it fails")
        # The other one is followed meanwhile.
        place.publish("n", 2)
        eventually(lambda: answers["n"][-1:] == [2], "the other one serves")
        place.proxy.heal()
        eventually(lambda: answers["m"][-1:] == [2], "what is new serves")
    for each in answers.values():
        assert each == sorted(each)
        assert set(each) == {1, 2}
