from __future__ import annotations

from google.protobuf import text_format
from hypothesis import given
from tests.support.configs import configs

from conch.protocol.model_config_pb2 import TYPE_FP32, ModelConfig
from conch_check.report import show_config
from conch_control.config.parse import OVERRIDE, config_origins, normalize, parse_config
from conch_control.config.schema import leaves, value_at


def test_each_value_has_the_origin_it_came_from() -> None:
    written = parse_config(
        'backend: "x" max_batch_size: 2 dynamic_batching {} input { name: "X" dims: [ 1, 2 ] }'
        ' parameters { key: "k" value { string_value: "v" } }',
        "c",
    )
    completed = ModelConfig()
    completed.CopyFrom(written)
    completed.name = "m"
    normalize(completed)  # as before a backend gets it
    completed.max_batch_size = 8
    completed.input[0].data_type = TYPE_FP32
    completed.output.add(name="Y", dims=[3])
    final = ModelConfig()
    final.CopyFrom(completed)
    final.instance_group.add(count=1)
    assert config_origins(written, completed, final) == {
        "name": "default",
        "backend": "config.pbtxt",
        "version_policy.latest.num_versions": "default",
        "max_batch_size": "model",
        "input[0].name": "config.pbtxt",
        "input[0].data_type": "model",
        "input[0].dims": "config.pbtxt",
        "output[0].name": "model",
        "output[0].dims": "model",
        "optimization.input_pinned_memory.enable": "default",
        "optimization.output_pinned_memory.enable": "default",
        "dynamic_batching.preferred_batch_size": "default",
        "instance_group[0].count": "default",
        'parameters["k"].string_value': "config.pbtxt",
    }
    assert config_origins(written, completed, final, OVERRIDE)["backend"] == "override"


@given(configs(), configs())
def test_every_value_has_an_origin(written: ModelConfig, completed: ModelConfig) -> None:
    final = ModelConfig()
    final.CopyFrom(completed)
    origins = config_origins(written, completed, final)
    assert list(origins) == [path for path, _, _ in leaves(final)]
    for path, origin in origins.items():
        in_file = any(place == path and value_at(final, path) == value for place, _, value in leaves(written))
        assert (origin == "config.pbtxt") <= in_file


@given(configs())
def test_what_is_shown_is_the_config(config: ModelConfig) -> None:
    shown = show_config(config, config_origins(config, config, config), lambda path: (3, 4))
    assert text_format.Parse(shown, ModelConfig()) == config
    origins = [line for line in shown.splitlines() if line.endswith("# config.pbtxt:3:4")]
    assert len(origins) == len(list(leaves(config)))


@given(configs())
def test_paths_lead_to_values(config: ModelConfig) -> None:
    before = config.SerializeToString(deterministic=True)
    for path, field, value in leaves(config):
        found = value_at(config, path)
        if found is not None or field.message_type is not None or field.has_presence:
            assert (list(found) if isinstance(value, list) else found) == value
    assert config.SerializeToString(deterministic=True) == before
