"""Loads, unloads and the index on a real Triton and on conch: answers, texts and states must be the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases.repository_cases import LOADS, REFUSED_PATHS
from tests.support.loading import (
    BROKEN,
    answer,
    config_json,
    files,
    load,
    load_request,
    model_text,
    settled,
    unload,
    write_ensemble,
    write_number,
)
from tests.support.peers import NEEDS_TRITON, Both, compare, serving_both
from tests.support.servers import RawClient, eventually, write_model
from tritonclient.grpc import service_pb2

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]

EXPLICIT = "--model-control-mode=explicit"
TWICE = "model appears in two or more repositories"


@dataclass
class Site:
    """Both servers and the one repository that they serve."""

    both: Both
    repository: Path

    def same(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Makes a call to both servers, whose outcomes must be the same, and gives it."""
        theirs, ours = (plain(call(client, *arguments)) for client in self.both.clients)
        assert ours == theirs, f"{ours} != {theirs}"
        return ours

    def states(self, *names: str) -> list[tuple[str, ...]]:
        """Lines of the index for some models; the same on both in the end: parts follow ensembles."""

        def shown(client: RawClient) -> list[tuple[str, ...]]:
            return [without_refusal(line) for line in settled(client) if line[0] in names]

        with suppress(AssertionError):  # `same` says what differs
            eventually(lambda: plain(shown(self.both.triton)) == plain(shown(self.both.conch)), "they agree")
        lines: list[tuple[str, ...]] = self.same(shown)
        return lines


def without_refusal(line: tuple[str, ...]) -> tuple[str, ...]:
    """A line of the index, without why a load changed nothing, which Triton only logs."""
    name, version, state, reason = line
    if state == "READY":
        return name, version, state, ""
    return line if version or reason in ("", TWICE) else (name, "", "", "")


def plain(outcome: Any) -> Any:
    """An outcome without the names of temporary directories and the frames of Python's import.

    Nor has it the reason of a model that can't be polled, which Triton has in its log.
    """
    if isinstance(outcome, str):
        outcome = re.sub(r"(failed to poll from model repository): .*", r"\1", outcome, flags=re.DOTALL)
        outcome = re.sub(r"/tmp/(folder|conch-model-)\w+", "/tmp/…", outcome)
        return re.sub(r"\n\nAt:\n.*?(;|$)", r"\1", outcome, flags=re.DOTALL).replace("\n;", ";")
    if isinstance(outcome, tuple | list):
        return type(outcome)(plain(each) for each in outcome)
    return outcome


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Both servers in explicit mode with models that the tests leave unloaded."""
    repository = tmp_path_factory.mktemp("models")
    write_number(repository, "m")
    write_number(repository, "n", 5)
    write_ensemble(repository, "e", "m")
    write_ensemble(repository, "f", "m")
    write_ensemble(repository, "outer", "e")
    write_ensemble(repository, "late", "ghost")
    with serving_both(repository, EXPLICIT) as both:
        yield Site(both, repository)


@pytest.mark.parametrize("name", LOADS)
def test_loads_that_do_nothing(site: Site, name: str) -> None:
    compare(site.both, LOADS[name].message)
    assert site.states("m") == [("m", "", "", "")]


def test_unknown_models(site: Site) -> None:
    request = load_request("m", {"x": 1})
    request.repository_name = "x"
    compare(site.both, request)
    for name in ("nope", " m", "m ", "M", "m\t"):
        site.same(load, name, {"config": config_json()})
        assert site.same(unload, name) == {}
    assert {line[0] for line in site.same(settled)} == {"m", "n", "e", "f", "outer", "late"}


def test_files(site: Site) -> None:
    def check(parameters: Any, name: str = "m") -> Any:
        said = site.same(load, name, parameters)
        site.same(answer, name)
        return said

    without_config = {key: value for key, value in files(v1=2).items() if key != "config"}
    for parameters in (
        without_config,
        files(v1=2),
        None,
        files(v1=3),
        {"config": config_json()},
        {**files(v2=2, v4=4), "config": config_json(version_policy={"all": {}})},
        files(v1=BROKEN),
        None,
        {**files(v1=2), "config": "{"},
        {**files(v1=2), "config": ""},
        {**files(v1=2), "config": config_json(name="other")},
        {**files(v1=2), "config": config_json(version_policy={"specific": {"versions": [9]}})},
        {"config": config_json(), "file:a": b""},
        {**files(v1=2), "file:config.pbtxt": b"nonsense", "file:labels.txt": b"", "file:1/é b\t": b""},
    ):
        check(parameters)
        site.states("m")
    for path in REFUSED_PATHS:
        assert check({**files(v1=7), f"file:{path}": b""})[0] == "INTERNAL", path
    for path in ("/etc/x", "1/a/../b", "x/./y", "1//b", "1/" + "x" * 255, "1/a\\b", "..."):
        assert check({**files(v1=8), f"file:{path}": b""}) == {}, path
    assert site.same(unload, "m") == {}
    assert check(None) == {}
    assert site.same(unload, "m") == {}


def test_files_of_a_model_that_no_repository_has(site: Site) -> None:
    assert site.same(load, "new", files(v3=2)) == {}
    site.same(answer, "new")
    assert site.same(load, "new")[0] == "INTERNAL"
    assert site.same(answer, "new") == 2.0
    assert site.states("new") == []
    site.same(unload, "new")
    assert site.same(answer, "new")[0] == "NOT_FOUND"
    site.same(load, "new", files(v1=BROKEN))
    site.same(answer, "new")
    site.same(unload, "new")
    assert site.states("new") == []


def test_configs(site: Site) -> None:
    def batch(client: RawClient) -> int:
        size: int = client("ModelConfig", service_pb2.ModelConfigRequest(name="m")).config.max_batch_size
        return size

    changed = {"config": config_json(max_batch_size=4)}
    site.same(load, "m")
    site.same(load, "m", changed)
    site.same(load, "m")
    assert site.same(batch) == 4
    os.utime(site.repository / "m" / "1" / "model.py")
    site.same(load, "m")
    assert site.same(batch) == 0
    site.same(load, "m", changed)
    os.utime(site.repository / "m" / "config.pbtxt")
    site.same(load, "m")
    assert site.same(batch) == 0
    site.same(load, "m", changed)
    for text in ("{", "", "[]", "null", '{"max_batch": 3}', '{"max_batch_size": "x"}', config_json(name="n")):
        assert site.same(load, "m", {"config": text})[0] == "INTERNAL", text
        assert site.same(batch) == 4
    none = config_json(version_policy={"specific": {"versions": [9]}})
    assert site.same(load, "m", {"config": none})[0] == "INVALID_ARGUMENT"
    assert site.same(batch) == 4
    site.same(unload, "m")
    site.same(load, "m")
    assert site.same(batch) == 0
    site.same(unload, "m")


def test_ensembles_and_their_parts(site: Site) -> None:
    names = ("e", "f", "m", "outer")

    def step(call: Callable[..., Any], *arguments: Any) -> None:
        assert site.same(call, *arguments) == {}
        site.states(*names)

    step(load, "outer")
    step(unload, "outer", True)  # takes all with it
    step(load, "e")
    step(load, "outer")
    step(load, "f")
    step(unload, "e", True)  # and what is made of it; m is needed still
    step(load, "e")
    step(load, "outer")
    step(unload, "m")
    step(load, "m")  # brings all of them back
    step(unload, "f")
    step(unload, "m")
    step(load, "m")  # but this one, which was unloaded itself
    step(unload, "outer", True)  # without e, which was asked for itself
    step(unload, "e", True)
    step(unload, "m")
    step(load, "f")
    step(unload, "f", False)
    step(unload, "f", True)
    step(unload, "m")


def test_an_ensemble_that_was_asked_for_comes_with_the_part_it_lacked(site: Site) -> None:
    said = site.same(load, "late")
    assert said[1].endswith("ensemble late contains models that are not available or ambiguous: ghost\n")
    assert site.same(load, "ghost", files(v1=3)) == {}
    assert site.states("late") == [("late", "1", "READY", "")]
    assert site.same(answer, "late") == 3.0
    site.same(unload, "ghost")
    assert site.states("late") == [("late", "1", "UNAVAILABLE", "unloaded")]
    site.same(load, "ghost", files(v1=4))
    assert site.same(answer, "late") == 4.0
    site.same(unload, "late")
    site.same(unload, "ghost")


def test_an_ensemble_with_another_config(site: Site) -> None:
    steps = [
        {
            "model_name": "n",
            "model_version": -1,
            "input_map": {"IN": "IN"},
            "output_map": {"OUT": "OUT"},
        }
    ]
    changed = config_json(backend="", platform="ensemble", ensemble_scheduling={"step": steps})
    site.same(load, "e", {"config": changed})
    assert site.same(answer, "e") == 5.0
    site.same(unload, "n")
    site.same(answer, "e")
    site.same(load, "n")
    assert site.same(answer, "e") == 5.0
    site.same(unload, "e")
    site.same(load, "e")
    assert site.same(answer, "e") == 1.0
    for name in ("e", "m", "n"):
        site.same(unload, name)


def test_a_model_whose_directory_is_gone(site: Site) -> None:
    directory = write_number(site.repository, "gone", 6)
    site.same(load, "gone")
    hidden = site.repository.parent / "gone"
    directory.rename(hidden)
    assert site.same(load, "gone")[0] == "INTERNAL"
    assert site.same(answer, "gone") == 6.0
    assert site.states("gone") == []
    site.same(unload, "gone")
    hidden.rename(directory)
    assert site.same(load, "gone") == {}
    site.same(unload, "gone")


def test_what_a_repository_may_look_like(tmp_path: Path) -> None:
    repository, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    every = "version_policy { all { } }"

    def versions(name: str, *directories: str, root: Path = repository) -> Path:
        (root / name).mkdir()
        directory = write_number(root, name, extra=every, versions=())
        for version in directories:
            (directory / version).mkdir()
            (directory / version / "model.py").write_text(model_text(1))
        return directory

    repository.mkdir()
    elsewhere.mkdir()
    for name in (".hidden", "..dots", "plain"):
        versions(name, "1")
    (repository / "file").write_text("not a model")
    (repository / "link").symlink_to(repository / "plain")
    (repository / "away").symlink_to(versions("away", "1", root=elsewhere))
    (versions("linked") / "7").symlink_to(versions("source", "7", root=elsewhere) / "7")
    versions("numbers", "1", "2", "02", "abc", "10")
    versions("others", "1", "warmup", "initial_state", "configs")
    versions("none")
    (versions("flat") / "1").write_text("not a version")
    (versions("bare", "1") / "config.pbtxt").unlink()
    (repository / "noversion").mkdir()
    write_ensemble(repository, "needs none", "none")
    write_model(
        repository, "noversion", (repository / "needs none" / "config.pbtxt").read_text(), versions=()
    )
    write_number(repository, "renamed", extra='name: "other"')
    write_number(
        repository, "specific", extra="version_policy { specific { versions: [ 2, 5 ] } }", versions=(1, 2)
    )
    write_number(
        repository, "latest", extra="version_policy { latest { num_versions: 2 } }", versions=(1, 2, 10)
    )
    variants = write_number(repository, "variants")
    (variants / "configs").mkdir()
    (variants / "configs" / "mine.pbtxt").write_text(
        (variants / "config.pbtxt").read_text().replace("[ 1 ]", "[ -1 ]")
    )
    (variants / "configs" / "yours.pbtxt").write_text("nonsense")
    with serving_both(repository, EXPLICIT, "--model-config-name=mine") as both:
        site = Site(both, repository)
        site.same(settled)
        for name in sorted(set(os.listdir(repository)) - {"triton.log"}):
            said = site.same(load, name)
            if said == {}:
                site.states(name)
        site.same(
            lambda client: list(
                client("ModelConfig", service_pb2.ModelConfigRequest(name="variants")).config.output[0].dims
            )
        )


def test_names_in_two_repositories(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for root in (first, second):
        root.mkdir()
        write_number(root, "twice")
    write_number(first, "once")
    write_ensemble(second, "e", "twice")
    with serving_both(first, EXPLICIT, f"--model-repository={second}") as both:
        site = Site(both, first)
        assert site.states("twice") == [("twice", "", "UNAVAILABLE", TWICE)]
        assert site.same(load, "twice")[0] == "INTERNAL"
        assert site.same(load, "once") == {}
        site.same(load, "e")
        site.same(load, "twice", files(v1=9))
        assert site.same(answer, "twice") == 9.0
        assert site.states("twice") == [("twice", "", "UNAVAILABLE", TWICE)]
        assert site.same(answer, "e") == 9.0
        assert site.same(load, "twice")[0] == "INTERNAL"
        assert site.same(answer, "twice") == 9.0
        (second / "twice").rename(tmp_path / "twice")
        site.same(load, "twice")
        assert site.same(answer, "twice") == 1.0
        assert site.states("twice") == [("twice", "1", "READY", "")]


@pytest.mark.parametrize("flags", [[], ["--model-control-mode=none"]], ids=["default", "none"])
def test_what_comes_first_where_loading_is_not_allowed(tmp_path: Path, flags: list[str]) -> None:
    write_number(tmp_path, "m")
    with serving_both(tmp_path, *flags) as both:
        site = Site(both, tmp_path)
        for name in ("m", "nope", "", "..", "a/b"):
            assert site.same(load, name, {"x": 1})[0] == "INVALID_ARGUMENT"
            for call, more in ((load, ()), (load, (files(v1=1),)), (unload, ())):
                code, text = call(both.triton, name, *more)
                assert code == "UNAVAILABLE"
                # Which mode is on, and which flag allows it, is ours to add.
                added = "; the model control mode is 'none', and --model-control-mode=explicit allows it"
                assert call(both.conch, name, *more) == (code, text + added)
        compare(both, service_pb2.RepositoryModelLoadRequest(repository_name="x"))
        compare(both, service_pb2.RepositoryModelUnloadRequest(repository_name="x"))


@pytest.mark.parametrize(
    ("startup", "loaded"), [(["*"], ["e", "m", "n"]), (["e"], ["e", "m"]), (["n", "n"], ["n"]), ([], [])]
)
def test_models_of_the_start(tmp_path: Path, startup: list[str], loaded: list[str]) -> None:
    write_number(tmp_path, "m")
    write_number(tmp_path, "n")
    write_ensemble(tmp_path, "e", "m")
    with serving_both(tmp_path, EXPLICIT, *(f"--load-model={name}" for name in startup)) as both:
        lines = Site(both, tmp_path).states("m", "n", "e")
    assert [name for name, _, state, _ in lines if state == "READY"] == loaded
