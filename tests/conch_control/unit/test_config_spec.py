from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.core.spec import DynamicBatching, InstanceGroup, ModelSpec, QueuePolicy, TensorSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.model_spec import build_spec
from conch_control.config.named_files import stays_within
from conch_control.config.parse import parse_config


def spec(text: str, directory: Path) -> ModelSpec:
    return build_spec(parse_config(text, "c"), directory, 3, "model.x", {"k": "v"})


def test_everything_the_core_reads(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n\nlast\n")
    made = spec(
        """
        name: "m" platform: "p" backend: "b" max_batch_size: 8
        input { name: "A" data_type: TYPE_STRING dims: [ 1 ] reshape {} }
        input { name: "B" data_type: TYPE_BF16 dims: [ -1, 2 ] optional: true }
        output { name: "C" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }
        instance_group { name: "g" kind: KIND_GPU count: 2 gpus: [ 0, 1 ] }
        instance_group { name: "h" kind: KIND_CPU count: 1 }
        dynamic_batching { preferred_batch_size: [ 8, 4, 8 ] max_queue_delay_microseconds: 100 }
        model_transaction_policy { decoupled: true }
        parameters { key: "P" value { string_value: "Q" } }
        """,
        tmp_path,
    )
    assert (made.name, made.version, made.platform, made.backend) == ("m", 3, "p", "b")
    assert made.inputs == (
        TensorSpec("A", "BYTES", (1,), reshape=()),
        TensorSpec("B", "BF16", (-1, 2), optional=True),
    )
    assert made.outputs == (TensorSpec("C", "FP32", (4,), labels=("cat", "dog", "", "last")),)
    assert made.instance_groups == (InstanceGroup("g", "GPU", 2, (0, 1)), InstanceGroup("h", "CPU", 1))
    assert made.batching == DynamicBatching((4, 8), 100_000)
    assert made.decoupled
    assert made.parameters == {"P": "Q"}
    assert (made.directory, made.version_directory) == (tmp_path, tmp_path / "3")
    assert made.model_file == "model.x"
    assert made.backend_options == {"k": "v"}
    assert made.config["max_batch_size"] == 8
    assert ModelConfig.FromString(made.config_message).name == "m"


def test_the_response_cache(tmp_path: Path) -> None:
    assert not spec('name: "m"', tmp_path).cached
    assert not spec('name: "m" response_cache {}', tmp_path).cached
    made = spec('name: "m" response_cache { enable: true }', tmp_path)
    assert (made.cached, made.cache_ttl_ns) == (True, 0)


@pytest.mark.parametrize(
    ("text", "ns"), [("60", 60 * 10**9), ("0.5", 5 * 10**8), ("1e-9", 1), ("1e9", 10**18)]
)
def test_how_long_cached_responses_are_valid(text: str, ns: int, tmp_path: Path) -> None:
    parameter = f'parameters {{ key: "CONCH_CACHE_TTL" value {{ string_value: "{text}" }} }}'
    assert spec(f'name: "m" {parameter}', tmp_path).cache_ttl_ns == ns


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "nan", "inf", "2e9", "1e-10"])
def test_a_validity_that_is_none(text: str, tmp_path: Path) -> None:
    parameter = f'parameters {{ key: "CONCH_CACHE_TTL" value {{ string_value: "{text}" }} }}'
    with pytest.raises(ConchError) as raised:
        spec(f'name: "m" {parameter}', tmp_path)
    assert raised.value.message == (
        f"parameter 'CONCH_CACHE_TTL' of model 'm' must be a number of seconds above 0, got '{text}'"
    )


def test_dynamic_batching_without_a_batch_dimension_merges_nothing(tmp_path: Path) -> None:
    assert spec('name: "m" dynamic_batching {}', tmp_path).batching is None


def test_each_priority_level_has_its_own_policy_or_the_default_one(tmp_path: Path) -> None:
    made = spec(
        """
        name: "m"
        dynamic_batching {
          priority_levels: 3 default_priority_level: 2
          default_queue_policy { max_queue_size: 7 }
          priority_queue_policy { key: 3 value {
            timeout_action: DELAY default_timeout_microseconds: 5 allow_timeout_override: true } }
        }
        """,
        tmp_path,
    )
    common = QueuePolicy(max_size=7)
    assert made.batching is not None, "policies hold without batching as well"
    assert made.batching.policies == (common, common, QueuePolicy(True, 5_000, True))
    assert made.batching.default_level == 2


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("", ()),
        ("priority_levels: 1 default_priority_level: 1", ()),
        ("default_queue_policy { timeout_action: DELAY allow_timeout_override: true }", ()),
        ("priority_queue_policy { key: 1 value { max_queue_size: 3 } }", ()),
        ("default_queue_policy { max_queue_size: 2 }", (QueuePolicy(max_size=2),)),
        ("priority_levels: 2 default_priority_level: 1", (QueuePolicy(), QueuePolicy())),
    ],
)
def test_policies_that_change_nothing_are_left_out(
    text: str, policies: tuple[QueuePolicy, ...], tmp_path: Path
) -> None:
    batching = spec(f'name: "m" max_batch_size: 2 dynamic_batching {{ {text} }}', tmp_path).batching
    assert batching is not None
    assert batching.policies == policies


def test_the_bound_of_the_queue(tmp_path: Path) -> None:
    text = 'name: "m" parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "%s" } }'
    assert spec('name: "m"', tmp_path).max_queue_size == 0
    assert spec(text % "0", tmp_path).max_queue_size == 0
    assert spec(text % "12", tmp_path).max_queue_size == 12
    for given, size in (('name: "m"', 7), (text % "0", 0), (text % "12", 12)):
        built = build_spec(parse_config(given, "c"), tmp_path, 1, "model", {}, 7)
        assert built.max_queue_size == size, "the model's own wins over the server's"
    for wrong in ("", "-1", "1.5", "many", "9" * 5000):
        with pytest.raises(ConchError) as raised:
            spec(text % wrong, tmp_path)
        assert raised.value.message == (
            f"parameter 'CONCH_MAX_QUEUE_SIZE' of model 'm' must be a whole number >= 0, got '{wrong}'"
        )


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../secret", "label file '../secret' of output 'C' must stay within the directory of model 'm'"),
        ("/etc/passwd", "must stay within the directory of model 'm'"),
        ("a/../../x", "must stay within"),
        ("none.txt", "none.txt: No such file or directory"),
        ("binary", "label file 'binary' of output 'C': "),
        ("nul\\000", "embedded null"),
    ],
)
def test_labels_that_cannot_be_read(tmp_path: Path, file: str, message: str) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    (tmp_path / "secret").write_text("x")
    (directory / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConchError) as raised:
        spec(f'name: "m" output {{ name: "C" data_type: TYPE_FP32 label_filename: "{file}" }}', directory)
    assert message in raised.value.message


def test_confinement() -> None:
    assert stays_within(Path("models/m"), "1/../shared.onnx")
    assert not stays_within(Path("models/m"), "1/../../n/model.onnx")
    assert not stays_within(Path("models/m"), "../mm")
    assert not stays_within(Path("models/m"), "/models/m")
    assert not stays_within(Path("/models/m"), "/models/m/1/model.onnx")
