"""Servers that follow a store which hangs, is busy, or cuts off what it sends, while requests keep coming."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tests.support.emulators import Bucket, S3Emulator, put_tree, s3_emulator
from tests.support.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving_process
from tests.support.steered import Steering, answer_of
from tests.support.waiting import given_time
from tritonclient.utils import InferenceServerException

FAULTS = (
    Fault.HANG,
    Fault.CORRUPT,
    *(pytest.param(fault, marks=pytest.mark.slow) for fault in (Fault.BUSY, Fault.TRUNCATE, Fault.DROP)),
)
MODELS = ("m", "n")


@pytest.fixture(scope="module")
def s3(grpc_is_warm: None) -> Iterator[S3Emulator]:
    with s3_emulator() as running:
        yield running


@contextmanager
def asking(server: ServerProcess) -> Iterator[dict[str, list[list[int]]]]:
    """Requests of two clients to each model during the block, none of which may fail; what each gets."""
    stop = threading.Event()
    answers: dict[str, list[list[int]]] = {name: [[], []] for name in MODELS}
    clients = [received for each in answers.values() for received in each]
    errors: list[BaseException] = []

    def ask(name: str, received: list[int]) -> None:
        with client_of(server) as client:
            try:
                while not stop.is_set():
                    received.append(answer_of(client, name))
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=ask, args=(name, received)) for name in MODELS for received in answers[name]
    ]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: all(clients) or errors, "answers come")
        yield answers
        for each in clients:
            more = len(each) + 20
            eventually(partial(lambda each, more: len(each) > more or errors, each, more), "answers come")
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert errors == []


def latest(clients: list[list[int]]) -> set[int]:
    """The last answers of several clients."""
    return {each[-1] for each in clients}


class Followed:
    """A repository in a store that a server follows, and a local one beside it."""

    def __init__(self, bucket: Bucket, proxy: FaultyProxy, path: Path) -> None:
        self._bucket = bucket
        self._steering = Steering(path)
        self._source = path / "source"
        self.local = path / "local"
        self.local.mkdir()
        self.proxy = proxy

    def publish(self, name: str, answer: int) -> None:
        """Writes a model, or has it answer with another number."""
        self._steering.write(self._source, name, 1, answer)
        put_tree(self._bucket, self._source / name, f"{name}/")

    def publish_locally(self, name: str, answer: int) -> None:
        """The same in the local repository."""
        self._steering.write(self.local, name, 1, answer)


@contextmanager
def followed(
    s3: S3Emulator, path: Path, mode: str = "poll", timeout_s: int = 1, *more: str
) -> Iterator[tuple[Followed, ServerProcess]]:
    """Models in a bucket of their own, and a server that has loaded them."""
    name = path.name.replace("_", "-").lower()
    with faulty_proxy(s3.port) as proxy, ExitStack() as stack:
        place = Followed(s3.bucket(name), proxy, path)
        for each in MODELS:
            place.publish(each, 1)
        flags = [
            f"--model-repository={s3.location(name, '', proxy.port)}",
            f"--model-cache-directory={path}/cache",
            f"--model-control-mode={mode}",
            "--repository-poll-secs=0.1",
            "--repository-settle-secs=0.2",
            *more,
        ]
        servers: list[ServerProcess] = []

        def start(limit_s: float) -> bool:
            """Starts a server; False if the store took longer than that, as it may on a busy machine."""
            arguments = [*flags, f"--storage-timeout-secs={limit_s:g}"]
            try:
                servers.append(
                    stack.enter_context(serving_process(flags=arguments, environment=s3.environment()))
                )
            except AssertionError as error:
                if "no answer within" not in str(error):
                    raise
            return bool(servers)

        given_time(start, timeout_s)
        yield place, servers[0]


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
        eventually(lambda: latest(answers["m"]) == {2}, "what is new serves")
        assert "unloading it" not in server.errors
    assert answers["m"] == [sorted(each) for each in answers["m"]]
    assert [set(each) for each in answers["n"]] == [{1}, {1}]


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
        eventually(lambda: latest(answers["n"]) == {2}, "the other one serves")
        place.proxy.heal()
        eventually(lambda: latest(answers["m"]) == {2}, "what is new serves")
    for each in (*answers["m"], *answers["n"]):
        assert each == sorted(each)
        assert set(each) == {1, 2}


HANGS_S = 300
"""Far longer than a test may take: what waits for the store does not come to its end."""


@pytest.mark.parametrize("mode", ["poll", "watch"])
def test_local_models_are_followed_while_the_store_hangs(s3: S3Emulator, tmp_path: Path, mode: str) -> None:
    local = f"--model-repository={tmp_path}/local"
    with (
        followed(s3, tmp_path, mode, HANGS_S, local) as (place, server),
        client_of(server) as client,
        asking(server) as answers,
    ):
        place.proxy.seen.clear()
        place.proxy.fail(Fault.HANG)
        eventually(place.proxy.count, "the store is asked, and hangs")
        for answer in (1, 2, 3):
            place.publish_locally("ours", answer)
            eventually(partial(answers_with, client, "ours", answer), "the local model is followed")
        assert {each["name"] for each in index_of(client)} == {"m", "n", "ours"}
        # The store's models change meanwhile; that is seen once it answers.
        place.publish("m", 2)
        asked = place.proxy.count()
        place.publish_locally("ours", 4)
        eventually(partial(answers_with, client, "ours", 4), "the local model is followed")
        assert place.proxy.count() == asked  # one listing is under way, and hangs
        assert latest(answers["m"]) == latest(answers["n"]) == {1}
        place.proxy.heal()
        eventually(lambda: latest(answers["m"]) == {2}, "what is new serves")
        place.publish("n", 2)
        eventually(lambda: latest(answers["n"]) == {2}, "what is new serves")
        assert server.errors.count("model 'm' is new or has changed") == 1
        assert "unloading it" not in server.errors
    for each in (*answers["m"], *answers["n"]):
        assert each == sorted(each)
        assert set(each) == {1, 2}


def test_local_models_can_be_loaded_while_the_store_hangs(s3: S3Emulator, tmp_path: Path) -> None:
    more = (f"--model-repository={tmp_path}/local", "--load-model=*")
    with (
        followed(s3, tmp_path, "explicit", HANGS_S, *more) as (place, server),
        client_of(server) as client,
        asking(server) as answers,
    ):
        place.proxy.seen.clear()
        place.proxy.fail(Fault.HANG)
        place.publish("m", 2)
        loads = threading.Thread(target=load, args=(server, "m"))
        loads.start()  # this one waits for the store
        try:
            eventually(place.proxy.count, "the store is asked, and hangs")
            asked = place.proxy.count()
            for answer in (1, 2, 3):
                place.publish_locally("ours", answer)
                client.load_model("ours", client_timeout=WAIT_S)
                assert answer_of(client, "ours") == answer
                assert {each["name"] for each in index_of(client)} == {"m", "n", "ours"}
            client.unload_model("ours", client_timeout=WAIT_S)
            assert place.proxy.count() == asked
            assert loads.is_alive()
            assert client.is_server_ready()
        finally:
            place.proxy.heal()
            loads.join()
        eventually(lambda: latest(answers["m"]) == {2}, "what was asked for serves")
    assert [set(each) for each in answers["m"]] == [{1, 2}, {1, 2}]
    assert [set(each) for each in answers["n"]] == [{1}, {1}]


def test_a_server_stops_while_the_store_hangs(s3: S3Emulator, tmp_path: Path) -> None:
    local = f"--model-repository={tmp_path}/local"
    with followed(s3, tmp_path, "poll", HANGS_S, local) as (place, server):
        place.proxy.seen.clear()
        place.proxy.fail(Fault.HANG)
        eventually(place.proxy.count, "the store is asked, and hangs")
        assert server.stop() == 0


def load(server: ServerProcess, name: str) -> None:
    """Loads a model, however long it takes."""
    with client_of(server) as client:
        client.load_model(name)


def answers_with(client: triton.InferenceServerClient, name: str, answer: int) -> bool:
    """True if a model serves and answers with a number."""
    try:
        return answer_of(client, name) == answer
    except InferenceServerException:
        return False


def index_of(client: triton.InferenceServerClient) -> list[dict[str, str]]:
    """The lines of the index."""
    found: list[dict[str, str]] = client.get_model_repository_index(client_timeout=WAIT_S, as_json=True)[
        "models"
    ]
    return found
