"""Several repositories with models of one name: `--model-namespacing`."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.support.cases import outcome
from tests.support.loading import (
    answer,
    config_json,
    files,
    index,
    load,
    settled,
    unload,
    write_ensemble,
    write_number,
)
from tests.support.metrics import of_model, scrape
from tests.support.peers import NEEDS_TRITON, Both, triton_serving
from tests.support.servers import AnyServer, RawClient, eventually, serving
from tritonclient.grpc import service_pb2

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.2", "--repository-settle-secs=0.2")
NAMES = ["m", "u", "x", "ea", "eb", "eu", "twice", "gone"]


def ambiguous(name: str) -> tuple[str, str]:
    text = "identifiers of model '{}' in global map, model namespace must be provided to resolve ambiguity."
    return "INVALID_ARGUMENT", f"There are 2 {text.format(name)}"


def write_two(directory: Path) -> tuple[Path, Path]:
    """Two repositories with a model `m` each, and ensembles that need it."""
    one, two = directory / "one", directory / "two"
    write_number(one, "m", 1)
    write_number(two, "m", 2)
    write_number(two, "u", 3)
    write_number(one, "x", 5)
    write_ensemble(one, "ea", "m")
    write_ensemble(two, "eb", "m")
    write_ensemble(one, "eu", "u")
    write_ensemble(one, "twice", "m")
    write_ensemble(two, "twice", "m")
    return one, two


@contextmanager
def namespaced(repositories: tuple[Path, ...], *flags: str) -> Iterator[tuple[AnyServer, RawClient]]:
    with (
        serving(*repositories, flags=["--model-namespacing=true", *flags]) as server,
        closing(RawClient(server.address)) as client,
    ):
        yield server, client


def test_ensembles_find_what_is_in_their_own_repository(tmp_path: Path) -> None:
    one, two = write_two(tmp_path)
    write_ensemble(one, "ec", "m", f'model_namespace: "{two}"')
    with namespaced((one, two), *EXPLICIT) as (server, client):
        assert [answer(client, name) for name in ("ea", "eb", "ec", "eu", "x", "u")] == [1, 2, 2, 3, 5, 3]
        found = scrape(server.metrics_url)  # which sees to it that no series is there twice
        for name in ("nv_inference_count", "conch_request_duration_seconds_count"):
            counts = [of_model(found, "m", name, namespace=str(where)) for where in (one, two)]
            assert counts == [1, 2]
        assert answer(client, "m") == ambiguous("m")
        assert answer(client, "twice") == ambiguous("twice")
        lines = index(client)
        assert [line[0] for line in lines] == ["ea", "eb", "ec", "eu", "m", "m", "twice", "twice", "u", "x"]
        assert {line[2] for line in lines} == {"READY"}
        metadata = client("ModelMetadata", service_pb2.ModelMetadataRequest(name="ea"))
        assert (metadata.name, list(metadata.versions)) == ("ea", ["1"])
        metadata = service_pb2.ModelMetadataRequest(name="m")
        assert outcome(lambda: client("ModelMetadata", metadata)) == ambiguous("m")
        ready = service_pb2.ModelReadyRequest(name="m")
        assert not client("ModelReady", ready).ready
        everything = client("ModelStatistics", service_pb2.ModelStatisticsRequest()).model_stats
        assert sorted(each.name for each in everything) == [line[0] for line in lines]
        statistics = service_pb2.ModelStatisticsRequest(name="m")
        assert [each.name for each in client("ModelStatistics", statistics).model_stats] == ["m", "m"]


@pytest.mark.slow
def test_loads_and_unloads_are_of_all_models_of_the_name(tmp_path: Path) -> None:
    one, two = write_two(tmp_path)
    with namespaced((one, two), *EXPLICIT, "--allow-model-upload") as (_, client):
        assert unload(client, "m") == {}
        assert answer(client, "m") == ("NOT_FOUND", "Identifier of model 'm' is not found in global map")
        unloaded = [line[0] for line in index(client) if line[2:] == ("UNAVAILABLE", "unloaded")]
        assert unloaded == ["ea", "eb", "m", "m", "twice", "twice"]
        assert answer(client, "eu") == 3
        assert load(client, "m") == {}
        assert [answer(client, name) for name in ("ea", "eb")] == [1, 2]
        assert answer(client, "m") == ambiguous("m")
        assert unload(client, f"{two}::m") == {}
        assert [answer(client, name) for name in ("ea", "m")] == [1, 1]
        assert load(client, f"{two}::m") == {}
        assert answer(client, "m") == ambiguous("m")
        assert load(client, "m", {"config": config_json()}) == {}
        assert answer(client, "m") == ambiguous("m")
        refused = ("UNIMPLEMENTED", "files can't be given with a load where models have namespaces")
        assert load(client, "x", files(v1=7)) == refused
        assert load(client, "nope") == (
            "INTERNAL",
            "failed to load 'nope', failed to poll from model repository",
        )


def test_only_what_an_ensemble_needs_is_loaded(tmp_path: Path) -> None:
    one, two = write_two(tmp_path)
    with namespaced((one, two), "--model-control-mode=explicit") as (_, client):
        assert answer(client, "m") == ("NOT_FOUND", "Request for unknown model: 'm' is not found")
        assert load(client, "eb") == {}
        assert [answer(client, name) for name in ("eb", "m")] == [2, 2]
        assert unload(client, "eb", dependents=True) == {}
        settled(client)
        assert answer(client, "m") == ("NOT_FOUND", "Identifier of model 'm' is not found in global map")


def test_a_name_that_no_repository_of_the_ensemble_makes_clear(tmp_path: Path) -> None:
    one, two = write_two(tmp_path)
    third = tmp_path / "third"
    write_ensemble(third, "lost", "m")
    with namespaced((one, two, third), "--model-control-mode=explicit") as (_, client):
        text = (
            f"load failed for model '{third}::lost': ensemble {third}::lost contains models that are not "
            f"available or ambiguous: m\n"
        )
        assert load(client, "lost") == ("INVALID_ARGUMENT", text)


@pytest.mark.parametrize("mode", ["poll", pytest.param("watch", marks=pytest.mark.slow)])
def test_ensembles_turn_to_the_only_model_left(tmp_path: Path, mode: str) -> None:
    """And back, without one request that fails."""
    one, two = write_two(tmp_path)
    flags = (f"--model-control-mode={mode}", *POLL[1:])
    with namespaced((one, two), *flags) as (server, client):
        stop = threading.Event()
        answers: list[object] = []

        def ask() -> None:
            with closing(RawClient(server.address)) as own:
                while not stop.is_set():
                    answers.append(answer(own, "ea"))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            shutil.move(one / "m", tmp_path / "away")
            eventually(lambda: answer(client, "ea") == 2, "the ensemble has the other model")
            eventually(lambda: answer(client, "m") == 2, "the name is clear again")
            assert answer(client, "eb") == 2
            shutil.move(tmp_path / "away", one / "m")
            eventually(lambda: answer(client, "ea") == 1, "the ensemble has its own model again")
            assert answer(client, "m") == ambiguous("m")
            assert answer(client, "eb") == 2
        finally:
            stop.set()
            asking.join()
        assert set(answers) == {1, 2}


@pytest.mark.slow
class TestBesideTriton:
    """The same requests to Triton 2.51."""

    pytestmark = NEEDS_TRITON

    def test_what_is_served(self, tmp_path: Path) -> None:
        one, two = write_two(tmp_path)
        more = [f"--model-repository={two}", "--model-namespacing=true"]
        with (
            namespaced((one, two), *EXPLICIT) as (_, conch),
            triton_serving(one, *more, *EXPLICIT) as triton,
        ):
            both = Both(triton, conch)
            self.same(both)
            for name in ("m", "eu"):
                assert unload(triton, name) == unload(conch, name) == {}
                assert settled(conch) == settled(triton)
                assert load(triton, name) == load(conch, name) == {}
                self.same(both)

    def same(self, both: Both) -> None:
        assert settled(both.conch) == settled(both.triton)
        for name in NAMES[:-1]:
            assert answer(both.conch, name) == answer(both.triton, name), name
