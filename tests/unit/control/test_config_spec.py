from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.core.spec import DynamicBatching, InstanceGroup, ModelSpec, TensorSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.parse import parse_config
from conch_control.config.spec import build_spec, stays_within


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


def test_dynamic_batching_without_a_batch_dimension_merges_nothing(tmp_path: Path) -> None:
    assert spec('name: "m" dynamic_batching {}', tmp_path).batching is None


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
