"""From a config to a loaded version: what fails a load, and what the backend adds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from conch.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tests.support.sites import Site


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('backend: "nope"', "Invalid argument: unable to find backend library for backend 'nope', try spec"),
        (
            'backend: "echo" sequence_batching { state { input_name: "x" output_name: "y" } }',
            "Invalid argument: state input 'x' must specify 'data_type'",
        ),
        (
            'backend: "echo" instance_group { kind: KIND_GPU }',
            "Invalid argument: instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
        ),
        ('backend: "echo" default_model_filename: "x"', "Unavailable: unable to find '"),
        (
            'backend: "echo" default_model_filename: "../../m2/1/model.echo"',
            "Invalid argument: default_model_filename '../../m2/1/model.echo' must stay within the directory",
        ),
        (
            'backend: "echo" default_model_filename: "/etc/passwd"',
            "Invalid argument: default_model_filename '/etc/passwd' must stay within the directory",
        ),
        (
            'backend: "echo" default_model_filename: "/there/is/none"',
            "Invalid argument: default_model_filename '/there/is/none' must stay within the directory",
        ),
        (
            'backend: "echo" runtime: "__invalid_runtime__"',
            "Invalid argument: unable to find backend library '__invalid_runtime__' for model 'm'",
        ),
        ('backend: "echo" input { name: "x" }', "Invalid argument: model input 'x' must specify 'data_type'"),
    ],
)
def test_configs_that_fail_the_load(site: Site, text: str, message: str) -> None:
    site.model("m2")
    site.model("m", config=text)
    with pytest.raises(InvalidArgumentError) as raised:
        site.agent().load("m", {})
    assert f"version 1 is at UNAVAILABLE state: {message}" in raised.value.message


def test_backend_completes_the_config(site: Site) -> None:
    directory = site.model("m", config='backend: "echo"')
    completed = {
        "name": "not its business",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],
    }
    (directory / "1" / "complete.json").write_text(json.dumps(completed))
    site.agent().load("m", {})
    spec = site.serving("m")[1].spec
    assert (spec.name, spec.max_batch_size, len(spec.inputs)) == ("m", 4, 1)
    assert spec.batching is not None
    assert spec.batching.preferred_sizes == (4,)


def test_strict_configs_are_not_completed(site: Site) -> None:
    directory = site.model("m", config='backend: "echo"')
    (directory / "1" / "complete.json").write_text('{"max_batch_size": 4}')
    site.agent(strict_model_config=True).load("m", {})
    assert site.serving("m")[1].spec.max_batch_size == 0


@pytest.mark.parametrize(
    ("completed", "message"),
    [
        ('{"max_batch": 4}', "Internal: backend 'echo' completed the config of model 'm' to something"),
        (
            '{"dynamic_batching": {"priority_levels": 1001, "default_priority_level": 1}}',
            "Unsupported: model 'm' uses 'dynamic_batching.priority_levels > 1000'",
        ),
        ('{"max_batch_size": -4}', "Invalid argument: 'max_batch_size' must be non-negative value for m"),
        ("no JSON", "Internal: Expecting value"),
    ],
)
def test_completion_gone_wrong(site: Site, completed: str, message: str) -> None:
    directory = site.model("m", config='backend: "echo"')
    (directory / "1" / "complete.json").write_text(completed)
    with pytest.raises(InvalidArgumentError) as raised:
        site.agent().load("m", {})
    assert message in raised.value.message


def test_backend_options_reach_the_backend(site: Site) -> None:
    site.model("m")
    options = {"": {"a": "1", "b": "1"}, "echo": {"b": "2"}, "other": {"c": "3"}}
    site.agent(backend_options=options).load("m", {})
    assert site.serving("m")[1].spec.backend_options == {"a": "1", "b": "2"}
