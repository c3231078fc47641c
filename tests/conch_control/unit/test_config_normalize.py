from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format

from conch.core.backend import Backend, BackendModel
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Devices
from conch.core.spec import InstanceGroup, ModelSpec, Resource
from conch.protocol.model_config_pb2 import ModelConfig, ModelInstanceGroup
from conch_control.config.instance_groups import read_groups, resolving_groups
from conch_control.config.parse import normalize, parse_config
from conch_control.config.platforms import filling_backend, pair_problems
from conch_control.config.problems import raise_first

IO = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
PINNED = "optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }"
LATEST = "version_policy { latest { num_versions: 1 } }"


class AnyBackend(Backend):
    default_model_file = "model"

    def load(self, spec: ModelSpec) -> BackendModel:
        raise NotImplementedError


def resolve(config: ModelConfig, gpus: int, cpu_count: int, allows_gpus: bool = True) -> None:
    class Chosen(AnyBackend):
        cpu_instance_count = cpu_count
        uses_gpus = allows_gpus

    raise_first(resolving_groups(config, Devices(tuple(range(gpus))), Chosen()))


def has(*names: str) -> Callable[[str], bool]:
    return frozenset(names).__contains__


@pytest.mark.parametrize(
    ("text", "file", "gpus", "cpu_count", "expected"),
    [
        pytest.param(
            f"max_batch_size: 4 dynamic_batching {{}} {IO}",
            "model.py",
            0,
            1,
            f"""
            name: "m" {LATEST} max_batch_size: 4 {IO}
            instance_group {{ name: "m" count: 1 kind: KIND_CPU }}
            dynamic_batching {{ preferred_batch_size: 4 }}
            default_model_filename: "model.py" {PINNED} backend: "python"
            """,
            id="python without a GPU",
        ),
        pytest.param(
            f"max_batch_size: 4 dynamic_batching {{}} {IO}",
            "model.py",
            1,
            1,
            f"""
            name: "m" {LATEST} max_batch_size: 4 {IO}
            instance_group {{ name: "m" count: 1 gpus: 0 kind: KIND_GPU }}
            dynamic_batching {{ preferred_batch_size: 4 }}
            default_model_filename: "model.py" {PINNED} backend: "python"
            """,
            id="python with a GPU",
        ),
        pytest.param(
            f'name: "m" platform: "onnxruntime_onnx" max_batch_size: 8 {IO}',
            "model.onnx",
            0,
            2,
            f"""
            name: "m" platform: "onnxruntime_onnx" {LATEST} max_batch_size: 8 {IO}
            instance_group {{ name: "m" count: 2 kind: KIND_CPU }}
            default_model_filename: "model.onnx" {PINNED} backend: "onnxruntime"
            """,
            id="complete ONNX config on the CPU",
        ),
        pytest.param(
            'backend: "onnxruntime" max_batch_size: 4 dynamic_batching {}',
            "model.onnx",
            0,
            2,
            f"""
            name: "m" platform: "onnxruntime_onnx" {LATEST} max_batch_size: 4
            instance_group {{ name: "m" count: 2 kind: KIND_CPU }}
            dynamic_batching {{ preferred_batch_size: 4 }}
            default_model_filename: "model.onnx" {PINNED} backend: "onnxruntime"
            """,
            id="ONNX with what completion adds",
        ),
        pytest.param(
            """
            backend: "identity" version_policy { latest {} }
            optimization { input_pinned_memory {} }
            instance_group [ { kind: KIND_MODEL }, { name: "x" kind: KIND_CPU count: 3 }, { gpus: [ 1 ] } ]
            dynamic_batching {}
            """,
            "model.so",
            2,
            2,
            f"""
            name: "m" backend: "identity" {LATEST}
            optimization {{ input_pinned_memory {{}} output_pinned_memory {{ enable: true }} }}
            instance_group [
              {{ name: "m_0" kind: KIND_MODEL count: 1 }}, {{ name: "x" kind: KIND_CPU count: 3 }},
              {{ name: "m_2" kind: KIND_GPU count: 1 gpus: 1 }}
            ]
            dynamic_batching {{}}
            """,
            id="what is given stays",
        ),
    ],
)
def test_golden(text: str, file: str, gpus: int, cpu_count: int, expected: str) -> None:
    config = parse_config(text, "c")
    config.name = "m"
    raise_first(filling_backend(config, has(file)))
    normalize(config)
    resolve(config, gpus, cpu_count)
    golden = text_format.Parse(expected, ModelConfig())
    assert text_format.MessageToString(config) == text_format.MessageToString(golden)
    normalize(config)
    resolve(config, gpus, cpu_count)
    assert config == golden


@pytest.mark.parametrize(
    ("text", "files", "backend", "platform", "model_file"),
    [
        ("", ("model.plan",), "tensorrt", "tensorrt_plan", "model.plan"),
        ("", ("model.onnx",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("", ("model.xml",), "openvino", "", "model.xml"),
        ("", ("model.pt",), "pytorch", "pytorch_libtorch", ""),
        ('backend: "pytorch"', ("model.pt",), "pytorch", "pytorch_libtorch", "model.pt"),
        ("", ("model.pt2",), "pytorch", "torch_aoti", "model.pt2"),
        ("", ("model.py",), "python", "", "model.py"),
        ("", ("model.py", "model.txt"), "python", "", "model.py"),
        ("", ("model.txt",), "lightgbm", "", "model.txt"),
        ("", ("model.skops",), "sklearn", "", "model.skops"),
        ("", ("model.json",), "xgboost", "", "model.json"),
        ("", ("model.xgb",), "xgboost", "", "model.xgb"),
        ("", ("xgboost.model",), "fil", "", "xgboost.model"),
        ("", ("model.savedmodel",), "tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
        ("", ("model.graphdef",), "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ('platform: "libtorch"', (), "pytorch", "libtorch", ""),
        ('backend: "pytorch"', ("model.pt2",), "pytorch", "torch_aoti", "model.pt2"),
        ('backend: "onnxruntime"', (), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        (
            'backend: "onnxruntime" default_model_filename: "a.onnx"',
            (),
            "onnxruntime",
            "onnxruntime_onnx",
            "a.onnx",
        ),
        ('default_model_filename: "model.py"', (), "python", "", "model.py"),
        ('backend: "mine"', ("model.onnx",), "mine", "", ""),
        ("", (), "suffix", "", "model.suffix"),
        ('default_model_filename: "a.bin"', (), "suffix", "", "a.bin"),
    ],
)
def test_backend_is_told_by_what_is_there(
    text: str, files: tuple[str, ...], backend: str, platform: str, model_file: str
) -> None:
    config = parse_config(text, "c")
    config.name = "m.suffix"
    raise_first(filling_backend(config, has(*files)))
    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, model_file)
    raise_first(pair_problems(config))


def test_a_file_of_a_usual_name_tells_the_backend_of_an_unknown_platform() -> None:
    config = ModelConfig(name="m", platform="onnxruntim", default_model_filename="model.onnx")
    raise_first(filling_backend(config, has()))
    with pytest.raises(InvalidArgumentError) as raised:
        raise_first(pair_problems(config))
    assert raised.value.message == "unexpected 'platform' and 'backend' pair, got:onnxruntim, onnxruntime"


def test_nothing_tells_the_backend(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        raise_first(filling_backend(ModelConfig(name="m"), has()))
    assert raised.value.message == (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )
    # Compressed by zlib, as by joblib.dump(..., compress=True), and plain.
    for name, content in (("model.joblib", b"\x78\x01rest"), ("model.pkl", b"\x80\x04\x95rest")):
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version / name).write_bytes(content)
        with pytest.raises(InvalidArgumentError) as raised:
            raise_first(filling_backend(ModelConfig(name="m"), has(name), version))
        text = f"Version directory 1 has '{name}', which is a Python pickle, which can run any code when"
        assert text in raised.value.message
        assert "`conch convert` makes a model of one" in raised.value.message


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    (tmp_path / "xgboost.json").write_text('{"x": 1}')
    (problem,) = filling_backend(ModelConfig(name="m"), has("xgboost.json"), tmp_path)
    assert problem.found == "'xgboost.json', which has not the content of such a file"
    assert problem.found in problem.message


@pytest.mark.parametrize(
    ("platform", "backend", "message"),
    [
        (
            "onnxruntime_onnx",
            "python",
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, python",
        ),
        ("foo", "onnxruntime", "unexpected 'platform' and 'backend' pair, got:foo, onnxruntime"),
        ("foo", "", "unexpected platform type 'foo' for m"),
        ("", "", "must specify 'platform' or 'backend' for 'm'"),
        ("ensemble", "x", "Ensemble model 'm' must have platform type 'ensemble' and empty backend type"),
        ("ensemble", "", "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
    ],
)
def test_pairs(platform: str, backend: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        raise_first(pair_problems(ModelConfig(name="m", platform=platform, backend=backend)))
    assert raised.value.message == message


def test_pair_of_unknowns() -> None:
    raise_first(pair_problems(ModelConfig(name="m", platform="foo", backend="bar")))


def test_groups_that_cannot_be_placed() -> None:
    config = parse_config('name: "m" instance_group { kind: KIND_CPU gpus: 0 }', "c")
    with pytest.raises(InvalidArgumentError) as raised:
        resolve(config, 1, 1)
    assert raised.value.message == (
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs"
    )


def test_a_backend_that_does_not_use_gpus_stays_on_the_cpu() -> None:
    config = parse_config('name: "m" instance_group { } instance_group { kind: KIND_GPU }', "c")
    resolve(config, 2, 3, allows_gpus=False)
    assert [(group.kind, group.count, list(group.gpus)) for group in config.instance_group] == [
        (ModelInstanceGroup.KIND_CPU, 3, []),
        (ModelInstanceGroup.KIND_GPU, 1, [0, 1]),
    ]


def test_groups_as_the_core_has_them() -> None:
    config = parse_config(
        """
        instance_group {
          name: "g" kind: KIND_GPU count: 2 gpus: [ 0, 2 ] passive: true profile: [ "0", "b" ]
          host_policy: "p" secondary_devices { device_id: 1 }
          rate_limiter {
            resources [ { name: "R" count: 4 }, { name: "S" global: true count: 1 } ] priority: 3
          }
        }
        instance_group { kind: KIND_MODEL rate_limiter { resources { name: "R" count: 1 } } }
        """,
        "c",
    )
    assert read_groups(config) == (
        InstanceGroup(
            "g", "GPU", 2, (0, 2), True, ("0", "b"), (Resource("R", 4), Resource("S", 1, True)), priority=3
        ),
        InstanceGroup("", "MODEL", 0, resources=(Resource("R", 1),), priority=1),
    )


def test_a_file_of_another_content_tells_no_backend(tmp_path: Path) -> None:
    """Models of all kinds have files such as model.json."""
    (tmp_path / "model.json").write_text("{}")
    config = parse_config("", "c")
    config.name = "m.suffix"
    raise_first(filling_backend(config, has("model.json"), tmp_path))
    assert config.backend == "suffix"
