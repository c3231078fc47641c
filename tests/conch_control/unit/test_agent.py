from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from conch.core.model_control import IndexEntry, ModelControl
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.version_phase import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.sites import Site

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
UNPOLLED = "failed to load 'm', failed to poll from model repository"


def test_mode_none_loads_everything_and_refuses_to_be_told(site: Site) -> None:
    site.model("a")
    site.model("b", {1: "ok", 2: "ok"})
    agent = site.agent("none")
    assert agent.start() == []
    gate: ModelControl = GuardedAgent(agent, "none")
    assert gate.index(True) == [IndexEntry("a", "1", "READY"), IndexEntry("b", "2", "READY")]
    with pytest.raises(UnavailableError, match=NOT_ALLOWED):
        gate.load("a", {})
    with pytest.raises(UnavailableError, match=NOT_ALLOWED):
        gate.unload("a", False)
    states = [
        (model.name, version.version, version.phase)
        for model in agent.models().models
        for version in model.versions
    ]
    assert states == [("a", 1, Phase.READY), ("b", 2, Phase.READY)]


@pytest.mark.parametrize(("startup", "loaded"), [((), []), (("b", "b"), ["b:1"]), (("*",), ["a:1", "b:1"])])
def test_explicit_startup(site: Site, startup: tuple[str, ...], loaded: list[str]) -> None:
    site.model("a")
    site.model("b")
    agent = site.agent(startup_models=startup)
    assert agent.start() == []
    assert sorted(site.loads()) == loaded
    assert agent.ready()


def test_failures_of_the_start_are_told_and_the_others_serve(site: Site, tmp_path: Path) -> None:
    site.model("bad", {1: "crash boom"})
    site.model("broken", config="max_batch: 1")
    site.model("good")
    site.model("twice")
    second = tmp_path / "second"
    site.model("twice", repository=second)
    agent = site.agent("none", repositories=(site.repository, second))
    failures = {failure.name: str(failure) for failure in agent.start()}
    assert sorted(failures) == ["bad", "broken", "twice"]
    assert "did you mean 'max_batch_size'?" in failures["broken"]
    assert "version 1 is at UNAVAILABLE state: Internal: boom" in failures["bad"]
    assert not agent.ready()
    assert agent.index(True) == [IndexEntry("good", "1", "READY")]
    lines = {line.name: line for line in agent.index(False)}
    assert lines["bad"] == IndexEntry("bad", "1", "UNAVAILABLE", "Internal: boom")
    assert lines["twice"] == IndexEntry(
        "twice", "", "UNAVAILABLE", "model appears in two or more repositories"
    )
    assert lines["broken"].state == "UNAVAILABLE"
    assert "did you mean 'max_batch_size'?" in lines["broken"].reason


def test_startup_model_that_does_not_exist(site: Site) -> None:
    agent = site.agent(startup_models=("ghost",))
    failures = agent.start()
    assert [str(failure) for failure in failures] == [
        "failed to load 'ghost': model not found in any model repository"
    ]
    assert agent.ready(), "as Triton: what does not exist is not awaited"
    assert agent.index(False) == []
    agent.unload("ghost", False)
    assert agent.ready()


def test_repository_that_is_no_directory(site: Site, tmp_path: Path) -> None:
    agent = site.agent(repositories=(tmp_path / "nowhere",))
    with pytest.raises(InvalidArgumentError, match=r"^repository path is not a valid directory"):
        agent.start()


def test_index_shows_what_is_in_the_repository(site: Site) -> None:
    site.model("a")
    site.model("b", {1: "ok", 10: "ok", 9: "ok"}, site.config("version_policy { all {} }"))
    agent = site.agent()
    assert agent.index(False) == [IndexEntry("a"), IndexEntry("b")]
    assert agent.index(True) == []
    agent.load("b", {})
    assert agent.index(False)[1:] == [IndexEntry("b", version, "READY") for version in ("1", "9", "10")]
    site.remove("b")
    assert agent.index(False) == [IndexEntry("a")]
    assert site.send("b").error() is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "Model name cannot be empty. Please enter a valid name to deploy."),
        (" \t", "Model name cannot be empty. Please enter a valid name to deploy."),
        ("..", "invalid model name '..', model name must not contain path traversal characters"),
        (" ..", "invalid model name ' ..', model name must not contain path traversal characters"),
        ("a/b", "invalid model name 'a/b', model name must not contain path traversal characters"),
    ],
)
def test_names_that_are_refused(site: Site, name: str, message: str) -> None:
    agent = site.agent()
    with pytest.raises(InvalidArgumentError) as raised:
        agent.load(name, {})
    assert raised.value.message == message
    agent.unload(name, False)


@pytest.mark.parametrize("name", ["...", "..my_model", "model..1"])
def test_names_that_only_look_like_traversal(site: Site, name: str) -> None:
    site.model(name)
    agent = site.agent()
    agent.load(name, {})
    assert site.send(name).error() is None


@pytest.mark.parametrize("name", [".", "ghost", "x" * 300, "nul\0"])
def test_unknown_models(site: Site, name: str) -> None:
    agent = site.agent()
    with pytest.raises(InternalError) as raised:
        agent.load(name, {})
    assert raised.value.message == f"failed to load '{name}', failed to poll from model repository"
    assert agent.ready()
    agent.unload(name, True)


def test_directory_and_config_disagree_on_the_name(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m", config='name: "n" backend: "echo"')
    agent = site.agent()
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", {})
    reason = "unexpected directory name 'm' for model 'n', directory name must equal model name"
    assert reason in caplog.text
    assert agent.index(False) == [IndexEntry("m", "", "UNAVAILABLE", reason)]
    assert agent.ready(), "it was not asked for at the start"
    site.model("m")
    agent.load("m", {})
    assert agent.index(False) == [IndexEntry("m", "1", "READY")]


def test_other_faults_are_told_before_a_wrong_name(site: Site) -> None:
    site.model("m", config='name: "n" platform: "ensemble" ensemble_scheduling {}')
    with pytest.raises(InternalError, match="must specify 'step' for ensemble 'n'"):
        site.agent().load("m", {})


def test_a_metric_family_that_can_not_be_set(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    names = ("nv_inference_request_success", "nv_inference_first_response_histogram_ms")
    controls = (
        f'metric_control {{ metric_identifier {{ family: "{name}" }} histogram_options {{ buckets: 1 }} }}'
        for name in names
    )
    site.model("m", config=site.config(f"model_metrics {{ {' '.join(controls)} }}"))
    site.agent().load("m", {})
    assert (
        "model 'm': Metric family 'nv_inference_request_success' in 'metric_identifier' is not a "
        "customizable metric in Triton core."
    ) in caplog.messages
    assert "histogram_ms" not in caplog.text


def test_missing_config(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    directory = site.model("m", config=None)
    with pytest.raises(InternalError, match=UNPOLLED):
        site.agent(strict_model_config=True).load("m", {})
    path = directory / "config.pbtxt"
    assert f"failed to open text file for read {path}: No such file or directory" in caplog.text
    with pytest.raises(InternalError, match=UNPOLLED):
        site.agent().load("m", {})
    assert "Could not determine backend for model 'm'" in caplog.text
    site.model("m.echo", config=None)
    site.agent().load("m.echo", {})


def test_named_config(site: Site) -> None:
    directory = site.model("m")
    (directory / "configs").mkdir()
    (directory / "configs" / "big.pbtxt").write_text('backend: "echo" max_batch_size: 64')
    site.agent(model_config_name="big").load("m", {})
    assert site.serving("m")[1].spec.max_batch_size == 64


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        (
            {"config": 3},
            InvalidArgumentError,
            "Config parameter 'config' must have string type for its value",
        ),
        (
            {"file:1/m": "text"},
            InvalidArgumentError,
            "File parameter 'file:1/m' must have bytes type for its value",
        ),
        (
            {"file:1/m": b""},
            InternalError,
            f"{UNPOLLED}: Load parameter 'config' must be specified for model file override",
        ),
        ({"x": 3}, InvalidArgumentError, "Unrecognized load parameter 'x' with type 'INT'"),
        ({"x": True}, InvalidArgumentError, "Unrecognized load parameter 'x' with type 'BOOL'"),
    ],
)
def test_parameters(site: Site, parameters: dict[str, Any], kind: type[ConchError], message: str) -> None:
    site.model("m")
    with pytest.raises(kind) as raised:
        site.agent().load("m", parameters)
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "none", "startup_models": ("a",)}, "requires setting '--model-control-mode=explicit'"),
        ({"startup_models": ("*", "a")}, "Wildcard model name '*' must be the ONLY startup model if spec"),
    ],
)
def test_options_that_contradict(site: Site, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as raised:
        site.agent(**options)
    assert message in raised.value.message


def test_the_operator_may_keep_the_data_port_from_loading(site: Site) -> None:
    site.model("a")
    agent = site.agent()
    gate: ModelControl = GuardedAgent(agent, "explicit", allowed=False)
    text = "model load / unload is not allowed on this port: the server runs with --allow-model-control=false"
    calls: list[Callable[[], None]] = [
        lambda: gate.load("a", {}),
        lambda: gate.load("", {"x": 1}),
        lambda: gate.unload("a", True),
    ]
    for call in calls:
        with pytest.raises(UnavailableError) as raised:
            call()
        assert raised.value.message == text
    agent.load("a", {})
    assert gate.index(True) == [IndexEntry("a", "1", "READY")]
    with pytest.raises(UnavailableError, match=NOT_ALLOWED):
        GuardedAgent(agent, "none", allowed=False).load("a", {})
