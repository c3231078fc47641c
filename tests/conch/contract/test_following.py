"""Servers that follow their repositories: modes poll and watch, while requests keep coming."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
    put_in_place,
    serving_process,
    tensor,
    write_model,
)
from tests.support.waiting import given_time
from tritonclient.utils import InferenceServerException

from conch_control.planner.watch_paths import file_system, is_silent

pytestmark = pytest.mark.process

SETTLE_S = 0.3

ANSWER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answer = pb_utils.Tensor("OUT", np.array([{answer}], np.int32))
        return [pb_utils.InferenceResponse([answer]) for _ in requests]
"""
CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def write(repository: Path, name: str, answer: int, version: int = 1, config: str = CONFIG) -> None:
    """Writes a model that answers with a number; what is new comes at once, however busy the machine is."""
    repository.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=repository) as aside:
        files = {"model.py": ANSWER.format(answer=answer)}
        put_in_place(write_model(Path(aside), name, config, files, (version,)), repository / name)


class Following:
    """A server that follows a repository, and a client of it."""

    def __init__(self, repository: Path, server: ServerProcess, client: triton.InferenceServerClient) -> None:
        self.repository = repository
        self.server = server
        self.client = client

    def answer(self, name: str = "m", client: triton.InferenceServerClient | None = None) -> int:
        inputs = [tensor("IN", np.zeros(1, np.int32), "INT32")]
        result = (client or self.client).infer(name, inputs, client_timeout=WAIT_S)
        return int(result.as_numpy("OUT")[0])

    def becomes(self, answer: int, name: str = "m") -> None:
        """Waits for another answer of a model."""

        def completed() -> bool:
            try:
                return self.answer(name) == answer
            except InferenceServerException:
                return False

        eventually(completed, f"{name} answers {answer}: {self.server.errors[-3000:]}")

    def lines(self, text: str) -> int:
        """Number of times that the log has a text."""
        return self.server.errors.count(text)

    def loads(self, name: str = "m") -> int:
        """Number of loads of a model since the start."""
        return self.lines(f"model '{name}' is new or has changed: loading it")

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """The repository's index."""
        found = self.client.get_model_repository_index(as_json=True).get("models", [])
        return {
            (each["name"], each.get("version", "")): (each.get("state", ""), each.get("reason", ""))
            for each in found
        }


def flags(mode: str, settle_s: float) -> list[str]:
    poll_s = 0.1 if mode == "poll" else 3600
    return [
        f"--model-control-mode={mode}",
        f"--repository-poll-secs={poll_s}",
        f"--repository-settle-secs={settle_s}",
    ]


@contextmanager
def following(mode: str, repository: Path, *more: str, settle_s: float = SETTLE_S) -> Iterator[Following]:
    """A server in one of the modes."""
    with (
        serving_process(repository, flags=[*flags(mode, settle_s), *more]) as server,
        client_of(server) as client,
    ):
        yield Following(repository, server, client)


@contextmanager
def asking(place: Following, name: str = "m") -> Iterator[list[list[int]]]:
    """Requests of two clients during the block, none of which may fail; what each gets, in order."""
    stop = threading.Event()
    answers: list[list[int]] = [[], []]
    errors: list[BaseException] = []

    def ask(received: list[int]) -> None:
        with client_of(place.server) as client:
            try:
                while not stop.is_set():
                    received.append(place.answer(name, client))
            except BaseException as error:
                errors.append(error)

    def wait_for_more() -> None:
        counts = [len(each) + 20 for each in answers]
        eventually(
            lambda: all(len(each) > count for each, count in zip(answers, counts, strict=True)) or errors,
            "requests are answered",
        )

    threads = [threading.Thread(target=ask, args=(each,)) for each in answers]
    for thread in threads:
        thread.start()
    try:
        wait_for_more()
        yield answers
        wait_for_more()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


# What is found is planned alike in both.
@pytest.fixture(params=[pytest.param("poll", marks=pytest.mark.slow), "watch"])
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Each of the modes."""
    if request.param == "watch" and is_silent(file_system(os.path.realpath(tmp_path))):
        pytest.skip(f"the file system of {tmp_path} tells of no changes")
    return request.param


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model."""
    directory = tmp_path / "models"
    write(directory, "m", 1)
    return directory


@pytest.mark.parametrize("mode", ["poll", "watch"], indirect=True)
def test_models_and_versions_come_change_and_go(mode: str, repository: Path) -> None:
    with following(mode, repository) as place, asking(place):
        assert place.client.is_server_ready()
        write(repository, "n", 10)
        place.becomes(10, "n")
        write(repository, "n", 20)
        place.becomes(20, "n")
        # A version that the policy selects in place of the other one.
        write(repository, "m", 2, version=2)
        place.becomes(2)
        eventually(
            lambda: place.index().get(("m", "1")) == ("UNAVAILABLE", "unloaded"), "version 1 is unloaded"
        )
        shutil.rmtree(repository / "m" / "2")
        place.becomes(1)
        shutil.rmtree(repository / "n")
        eventually(lambda: not place.client.is_model_ready("n"), "n is unloaded")
        with pytest.raises(InferenceServerException):
            place.answer("n")
        assert (place.loads("n"), place.loads("m")) == (2, 2)
        assert place.client.is_server_ready()


def test_what_does_not_change_is_not_loaded(mode: str, repository: Path) -> None:
    write(repository, "other", 1)
    with following(mode, repository) as place:
        place.becomes(1)
        write(repository, "other", 2)
        place.becomes(2, "other")
        assert (place.loads(), place.loads("other")) == (0, 1)
        assert place.lines("loading: m:1") == 1  # at the start


def test_a_directory_that_is_renamed_over(mode: str, repository: Path, tmp_path: Path) -> None:
    with following(mode, repository) as place, asking(place) as answers:
        for number in (2, 3):
            write(tmp_path / "next", "m", number)
            os.rename(repository / "m", tmp_path / f"before {number}")
            os.rename(tmp_path / "next" / "m", repository / "m")
            place.becomes(number)
        assert place.loads() == 2
    assert answers == [sorted(each) for each in answers]


def test_a_kubernetes_volume(mode: str, tmp_path: Path) -> None:
    volume = tmp_path / "volume"

    def publish(number: int) -> None:
        directory = f"..2026_01_01_10_00_0{number}.{number}"
        write(volume / directory, "m", number)
        (volume / "..data_tmp").symlink_to(directory)
        os.replace(volume / "..data_tmp", volume / "..data")

    publish(1)
    (volume / "m").symlink_to("..data/m")
    with following(mode, volume) as place, asking(place) as answers:
        assert {name for name, _ in place.index()} == {"m"}
        for number in (2, 3):
            publish(number)
            place.becomes(number)
            shutil.rmtree(volume / f"..2026_01_01_10_00_0{number - 1}.{number - 1}")
        assert place.loads() == 2
    assert answers == [sorted(each) for each in answers]


def test_a_slow_copy_is_loaded_once_and_whole(mode: str, repository: Path) -> None:
    """The config comes first and would do; what it needs comes in pieces."""
    big = "x" * 1000
    text = ANSWER.format(answer=2) + "".join(f"\nPART_{number} = '{big}'" for number in range(8))

    def copy(settle_s: float) -> bool:
        """Copies a version; False if the machine held up the copy for about as long as files have to rest."""
        shutil.rmtree(repository / "m" / "2", ignore_errors=True)
        with following(mode, repository, settle_s=settle_s) as place, asking(place):
            moments = [time.monotonic()]
            (repository / "m" / "2").mkdir()
            pause = threading.Event()
            with (repository / "m" / "2" / "model.py").open("w") as file:
                for start in range(0, len(text), len(text) // 8):
                    file.write(text[start : start + len(text) // 8])
                    file.flush()
                    pause.wait(settle_s / 3)
                    moments.append(time.monotonic())
            place.becomes(2)
            if max(later - before for before, later in pairwise(moments)) > settle_s / 2:
                return False
            assert place.loads() == 1
            assert place.lines("failed to load") == 0
            return True

    given_time(copy, SETTLE_S)


def test_a_copy_that_is_marked_waits_for_the_end(mode: str, repository: Path) -> None:
    with following(mode, repository) as place, asking(place):
        half = repository / ".half"
        half.mkdir()
        (half / ".incomplete").touch()
        (half / "model.py").write_text("half of it")
        half.rename(repository / "m" / "2")
        eventually(lambda: place.lines("model 'm' is marked as incomplete"), "the server has seen it")
        write(repository, "other", 1)
        place.becomes(1, "other")
        assert (place.loads(), place.answer()) == (0, 1)
        write(repository, "m", 2, version=2)
        (repository / "m" / "2" / ".incomplete").unlink()
        place.becomes(2)
        assert place.loads() == 1


def test_a_model_that_is_incomplete_at_the_start_comes_later(mode: str, repository: Path) -> None:
    (repository / "late").mkdir()
    (repository / "late" / ".incomplete").touch()
    with following(mode, repository) as place:
        assert place.client.is_server_ready()
        assert place.index()["late", ""] == ("", "")
        write(repository, "late", 5)
        (repository / "late" / ".incomplete").unlink()
        place.becomes(5, "late")


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: (model / "config.pbtxt").write_text("max_batch_size: {"),
        lambda model: (model / "1" / "model.py").write_text("raise ValueError('broken')"),
        lambda model: (model / "1" / "model.py").unlink(),
    ],
    ids=["config", "model", "file"],
)
def test_what_is_broken_leaves_the_old_one_serving(
    mode: str, repository: Path, damage: Callable[[Path], Any]
) -> None:
    with following(mode, repository) as place, asking(place) as answers:
        damage(repository / "m")
        eventually(lambda: place.lines("failed to load 'm', what served before goes on"), "it fails")
        assert place.answer() == 1
        assert place.client.is_server_ready()
        write(repository, "m", 2)
        place.becomes(2)
        assert place.loads() == 2
    assert answers == [sorted(each) for each in answers]


def test_an_ensemble_and_its_part_are_loaded_once_each(mode: str, repository: Path) -> None:
    ensemble = """
        platform: "ensemble"
        input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
        ensemble_scheduling { step {
            model_name: "part" model_version: -1
            input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
        } }
    """
    with following(mode, repository) as place:
        write(repository, "part", 1)
        write_model(repository, "all", ensemble)
        place.becomes(1, "all")
        with asking(place, "all"):
            write(repository, "part", 2)
            place.becomes(2, "all")
        assert (place.loads("all"), place.loads("part")) == (1, 2)
        assert place.lines("loading: part:1") == 2


def test_clients_can_not_load_and_unload(mode: str, repository: Path) -> None:
    with following(mode, repository) as place:
        for call in (place.client.load_model, place.client.unload_model):
            with pytest.raises(InferenceServerException) as raised:
                call("m")
            assert raised.value.status() == "StatusCode.UNAVAILABLE"
            assert raised.value.message() == (
                f"explicit model load / unload is not allowed if polling is enabled; the model control mode "
                f"is '{mode}', and --model-control-mode=explicit allows it"
            )


def test_a_failed_start_can_be_mended(mode: str, repository: Path) -> None:
    write(repository, "n", 1, config="nonsense {")
    with following(mode, repository, "--exit-on-error=false") as place:
        assert place.index()["n", ""][0] == "UNAVAILABLE"
        write(repository, "n", 1)
        place.becomes(1, "n")
        assert place.client.is_server_ready()


def test_a_stop_while_a_model_is_being_loaded(mode: str, repository: Path, tmp_path: Path) -> None:
    """The server ends although the load never would."""
    with following(mode, repository, "--exit-timeout-secs=1", IN_PROCESS) as place:
        write_model(
            repository,
            "slow",
            CONFIG,
            {
                "model.py": "import time\nfrom pathlib import Path\n"
                f"Path({str(tmp_path / 'loading')!r}).touch()\ntime.sleep(60)\n"
            },
        )
        eventually((tmp_path / "loading").exists, "slow is being loaded")
        place.server.signal(15)
        assert place.server.wait() == 1
        assert "Exit timeout expired" in place.server.errors
