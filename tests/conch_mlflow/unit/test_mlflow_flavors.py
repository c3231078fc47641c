"""Results of artifacts: files, configs, or a sentence that says why not."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.parse import decode_config
from conch_mlflow.flavors import Artifact, VersionPlan, plan_version
from conch_stores.stores import StoredObject

PYTHON = f"python: {sys.version_info[0]}.{sys.version_info[1]}.7\n"
OTHER_PYTHON = "python: 3.99.1\n"
SIGNATURE = {
    "inputs": json.dumps(
        [
            {"type": "double", "name": "a", "required": True},
            {"type": "string", "name": "b", "required": False},
        ]
    ),
    "outputs": json.dumps([{"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1, 2]}}]),
    "params": json.dumps(
        [
            {"name": "factor", "type": "float", "default": 1.0, "shape": None},
            {"name": "names", "type": "string", "default": ["x"], "shape": [-1]},
        ]
    ),
}
_COMPLEX = {"type": "tensor", "tensor-spec": {"dtype": "complex64", "shape": [-1]}}
PYFUNC = {"python_function": {"loader_module": "mlflow.pyfunc.model", "python_model": "python_model.pkl"}}
FILES = {
    "python_model.pkl": b"pickle",
    "requirements.txt": b"mlflow==3.17.2\nnumpy",
    "python_env.yaml": PYTHON.encode(),
}


def planned(
    flavors: Any,
    files: Mapping[str, bytes],
    flavor: str = "",
    allow_code: bool = False,
    signature: Any = None,
) -> VersionPlan:
    """The plan for an artifact."""
    items = {path: StoredObject(path, len(content), "", 0) for path, content in files.items()}

    def read(item: StoredObject, start: int, end: int) -> bytes:
        return files[item.path][start:end]

    return plan_version(
        Artifact({"flavors": flavors, "signature": signature}, items, read), flavor, allow_code
    )


def sources(plan: VersionPlan) -> dict[str, str]:
    """File of the artifact for each staged one."""
    assert not plan.problem, plan.problem
    return {path: item.path for path, item in (*plan.files.items(), *plan.shared.items())}


def config_of(plan: VersionPlan) -> ModelConfig:
    return decode_config(plan.config, "config.pbtxt")


def archive(*members: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for member in members:
            file.writestr(member, "x" * 100_000)
    return content.getvalue()


@pytest.mark.parametrize(
    ("flavors", "paths", "backend", "staged"),
    [
        (
            {"onnx": {"data": "model.onnx"}},
            ["model.onnx", "w.data"],
            "onnxruntime",
            {"model.onnx": "model.onnx", "w.data": "w.data"},
        ),
        (
            {"onnx": {"data": "d/net.onnx"}},
            ["d/net.onnx", "d/w.data", "o"],
            "onnxruntime",
            {"model.onnx": "d/net.onnx", "w.data": "d/w.data"},
        ),
        (
            {"sklearn": {"pickled_model": "m.skops", "serialization_format": "skops"}},
            ["m.skops", "conda.yaml"],
            "sklearn",
            {"model.skops": "m.skops"},
        ),
        (
            {"xgboost": {"data": "model.ubj", "model_format": "ubj"}},
            ["model.ubj"],
            "xgboost",
            {"model.ubj": "model.ubj"},
        ),
        ({"xgboost": {"data": "model.json"}}, ["model.json"], "xgboost", {"model.json": "model.json"}),
        ({"lightgbm": {"data": "model.lgb"}}, ["model.lgb"], "lightgbm", {"model.txt": "model.lgb"}),
        ({"lightgbm": {"data": "model.skops"}}, ["model.skops"], "sklearn", {"model.skops": "model.skops"}),
    ],
)
def test_flavors_of_engines(flavors: Any, paths: list[str], backend: str, staged: dict[str, str]) -> None:
    own = {"MLmodel": b"", "requirements.txt": b"mlflow", "input_example.json": b"{}"}
    plan = planned({**flavors, **PYFUNC}, {**dict.fromkeys(paths, b"x"), **own})
    assert sources(plan) == staged
    config = config_of(plan)
    assert config.backend == backend and config.HasField("version_policy")
    # Without the flavor, code is needed.
    assert "--mlflow-allow-code" in planned(PYFUNC, FILES).problem
    assert planned({**flavors, **PYFUNC}, FILES | dict.fromkeys(paths, b"x"), "python_function").problem


@pytest.mark.parametrize(
    ("flavors", "folder"),
    [({"tensorflow": {"saved_model_dir": "tf"}}, "tf"), ({"keras": {"data": "data"}}, "data/model")],
)
def test_a_saved_model_is_a_program(flavors: Any, folder: str) -> None:
    files = {f"{folder}/saved_model.pb": b"x", f"{folder}/variables/v": b"x"}
    assert "backend 'tensorflow'" in planned(flavors, files).problem
    plan = planned(flavors, files, allow_code=True)
    assert sources(plan) == {f"model.savedmodel/{path[len(folder) + 1 :]}": path for path in files}
    assert config_of(plan).backend == "tensorflow"


@pytest.mark.parametrize(
    ("flavors", "path"),
    [
        ({"sklearn": {"pickled_model": "model.pkl", "serialization_format": "cloudpickle"}}, "model.pkl"),
        ({"xgboost": {"data": "model.deprecated"}}, "model.deprecated"),
        ({"lightgbm": {"data": "model.pkl"}}, "model.pkl"),
        ({"pytorch": {"model_data": "data"}}, "data/model.pth"),
        ({"keras": {"data": "data"}}, "data/model.keras"),
        ({"prophet": {"data": "m"}}, "m"),
    ],
)
def test_pickles_and_other_flavors_need_code(flavors: Any, path: str) -> None:
    files = {**FILES, path: archive("model/data.pkl")}
    plan = planned({**flavors, **PYFUNC}, files, signature=SIGNATURE)
    assert "flavor python_function" in plan.problem and "--mlflow-allow-code is off" in plan.problem
    assert sources(planned({**flavors, **PYFUNC}, files, "", True, SIGNATURE))[f"artifact/{path}"] == path
    assert "no engine serves" in planned(flavors, files, "", True, SIGNATURE).problem


def test_pytorch_programs_and_scripts() -> None:
    flavors = {"pytorch": {"model_data": "data"}, **PYFUNC}
    program = {"data/model.pt2": archive("net/models/model.json", "net/data/weights/w")}
    assert sources(planned(flavors, program)) == {"model.pt2": "data/model.pt2"}
    compiled = {"data/model.pt2": archive("net/data/aotinductor/model/x.so")}
    assert "compiled code, 'net/data/aotinductor/model/x.so'" in planned(flavors, compiled).problem
    assert not planned(flavors, compiled, "", True).problem
    script = {"data/model.pth": archive("m/data.pkl", "m/constants.pkl")}
    plan = planned(flavors, script, signature=SIGNATURE)
    assert sources(plan) == {"model.pt": "data/model.pth"}
    assert [each.name for each in config_of(plan).input] == ["a", "b", "factor", "names"]
    assert "python_function" in planned(flavors, script).problem  # without a signature


def test_a_directory_in_tritons_layout_is_the_model() -> None:
    flavors = {"triton": {"data": "t"}, "onnx": {"data": "model.onnx"}}
    config = 'backend: "onnxruntime" # mine\nversion_policy { latest { num_versions: 1 } }\n'
    files = {
        "t/1/old": b"",
        "t/2/model.onnx": b"",
        "t/2/d/x": b"",
        "t/config.pbtxt": config.encode(),
        "t/labels.txt": b"",
        "model.onnx": b"",
    }
    plan = planned(flavors, files)
    assert sources(plan) == {"model.onnx": "t/2/model.onnx", "d/x": "t/2/d/x", "labels.txt": "t/labels.txt"}
    assert plan.config.decode() == config
    assert sources(planned(flavors, files, "onnx"))["model.onnx"] == "model.onnx"
    assert "no version directory" in planned({"triton": {"data": "t"}}, {"t/model.onnx": b""}).problem


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"1/model.py": b""}, "'model.py'"),
        ({"1/model.onnx": b"", "1/custom.so": b""}, "'custom.so'"),
        ({"1/model.onnx": b"", "api.py": b""}, "'api.py'"),
        ({"1/model.pt2": b""}, "backend 'pytorch'"),
        ({"1/model.x": b"", "config.pbtxt": b'backend: "python"'}, "backend 'python'"),
        ({"1/model.x": b"", "config.pbtxt": b'backend: "/tmp/mine"'}, "backend '/tmp/mine'"),
        (
            {
                "1/model.onnx": b"",
                "config.pbtxt": b'backend: "onnxruntime" model_operations { op_library_filename: "/tmp/x" }',
            },
            "model_operations",
        ),
        *(
            (
                {
                    "1/model.onnx": b"",
                    "config.pbtxt": f'backend: "{backend}" parameters {{ key: "{name}" value {{ '
                    f'string_value: "/tmp/x" }} }}'.encode(),
                },
                f"parameter '{name}'",
            )
            for backend, name in (
                *(("openvino", "CPU_EXTENSION_PATH"), ("openvino", "CONCH_OV_CPU_EXTENSION_PATH")),
                *(
                    ("openvino", "CACHE_DIR"),
                    ("openvino", "CONCH_OV_CACHE_DIR"),
                    ("openvino", "CONCH_OV_NEW"),
                ),
                *(("onnxruntime", "session.model_external_initializers_file_folder_path"),),
                *(("onnxruntime", "session.collect_node_memory_stats_to_file"), ("sklearn", "tokenizer")),
                *(("xgboost", "CONCH_ENV_LD_PRELOAD"), ("fil", "a_new_parameter")),
            )
        ),
        *(
            (
                {
                    "1/model.onnx": b"",
                    "config.pbtxt": b'backend: "onnxruntime" optimization { execution_accelerators { '
                    b'gpu_execution_accelerator { name: "%s" parameters { key: "%s" value: "1" } } } }'
                    % (accelerator.encode(), name.encode()),
                },
                f"parameter '{name}' of accelerator '{accelerator}'",
            )
            for accelerator, name in (
                *(
                    ("cuda", "gpu_external_alloc"),
                    ("cuda", "user_compute_stream"),
                    ("openvino", "load_config"),
                ),
                *(("openvino", "cache_dir"), ("tensorrt", "trt_dump_subgraphs")),
                *(("tensorrt", "trt_extra_plugin_lib_paths"), ("tensorrt", "trt_engine_cache_prefix")),
            )
        ),
        ({"1/model.onnx": b"", "1/x.so.1": b""}, "'x.so.1'"),
        ({"1/model.onnx": b"", "config.pbtxt": b'backend: "fil" runtime: "libx.so"'}, "runtime 'libx.so'"),
        (
            {
                "1/": b"",
                "config.pbtxt": b'platform: "ensemble" model_repository_agents { agents { name: "x" } }',
            },
            "model_repository_agents",
        ),
    ],
)
def test_nothing_of_an_artifact_runs_unless_that_is_allowed(files: dict[str, bytes], found: str) -> None:
    whole = {f"t/{path}": content for path, content in files.items()}
    problem = planned({"triton": {"data": "t"}}, whole).problem
    assert found in problem and "--mlflow-allow-code is off" in problem
    assert not planned({"triton": {"data": "t"}}, whole, "", True).problem
    if "config.pbtxt" in files and "1/model.onnx" in files:
        beside = {"model.onnx": b"", "config.pbtxt": files["config.pbtxt"]}
        assert found in planned({"onnx": {"data": "model.onnx"}}, beside).problem


def test_a_config_in_the_artifact_wins() -> None:
    files = {
        "model.onnx": b"",
        "config.pbtxt": b'name: "x" backend: "onnxruntime" max_batch_size: 7',
        "more.txt": b"",
    }
    plan = planned({"onnx": {"data": "model.onnx"}}, files)
    assert sources(plan) == {"model.onnx": "model.onnx", "more.txt": "more.txt"}
    assert config_of(plan).max_batch_size == 7 and config_of(plan).version_policy.HasField("all")


def test_pyfunc_gets_an_environment_and_a_config_by_its_signature() -> None:
    plan = planned(PYFUNC, FILES, "", True, SIGNATURE)
    files = {f"artifact/{path}": path for path in FILES}
    assert sources(plan) == {**files, "requirements.txt": "requirements.txt"}
    compile(plan.made["model.py"], "model.py", "exec")
    config = config_of(plan)
    assert config.backend == "python" and config.max_batch_size == 0
    assert [(each.name, list(each.dims), each.data_type, each.optional) for each in config.input] == [
        ("a", [-1], 12, False),
        ("b", [-1], 13, True),
        ("factor", [1], 11, True),
        ("names", [-1], 13, True),
    ]
    assert [(each.name, list(each.dims), each.data_type) for each in config.output] == [
        ("output", [-1, 2], 9)
    ]


def test_pyfunc_for_another_python_lists_its_packages_in_the_script() -> None:
    files = {**FILES, "python_env.yaml": OTHER_PYTHON.encode()}
    plan = planned(PYFUNC, files, "", True, SIGNATURE)
    assert "requirements.txt" not in plan.files
    head = plan.made["model.py"].decode().partition("# ///\n")[0]
    assert '# requires-python = "==3.99.*"' in head and '#   "mlflow==3.17.2",\n#   "numpy",' in head
    files["requirements.txt"] = b"--index-url https://x\nmlflow"
    assert "has the line '--index-url https://x'" in planned(PYFUNC, files, "", True, SIGNATURE).problem


@pytest.mark.parametrize(
    ("signature", "found"),
    [
        (None, "does not have inputs and outputs"),
        ({"inputs": '[{"type": "double", "name": "a"}]'}, "does not have inputs and outputs"),
        ({**SIGNATURE, "inputs": '[{"type": "object", "name": "o"}]'}, "column 'o' of type 'object'"),
        ({**SIGNATURE, "inputs": json.dumps([_COMPLEX])}, "'complex64'"),
        ({**SIGNATURE, "inputs": "no JSON"}, "no list of tensors"),
        ({**SIGNATURE, "inputs": '[{"type": "double", "name": "factor"}]'}, "have one name"),
        ({**SIGNATURE, "outputs": json.dumps([{"type": "double", "name": "a"}] * 2)}, "name twice"),
    ],
)
def test_signatures_without_a_counterpart(signature: Any, found: str) -> None:
    assert found in planned(PYFUNC, FILES, "", True, signature).problem


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", 7, None])
def test_an_mlmodel_can_not_name_files_elsewhere(path: Any) -> None:
    for flavors in (
        {"onnx": {"data": path}},
        {"triton": {"data": path}},
        {"tensorflow": {"saved_model_dir": path}},
    ):
        plan = planned(flavors, {"model.onnx": b"", "x": b""})
        assert plan.problem and not plan.files


_keys = st.sampled_from(["data", "pickled_model", "model_data", "predict_fn", "x"])
_names = st.sampled_from(
    ["triton", "onnx", "pytorch", "sklearn", "xgboost", "lightgbm", "keras", "python_function"]
)
_texts = st.text(max_size=8) | st.sampled_from(["data", "model.onnx", "..", "skops"])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(_names, _json),
    _json,
    st.booleans(),
)
def test_whatever_an_mlmodel_says_there_is_a_plan_or_a_problem(
    flavors: Any, signature: Any, allow: bool
) -> None:
    files = {**FILES, "model.onnx": b"", "data/model.pt2": b"no archive", "data/1/x": b""}
    plan = planned(flavors, files, "", allow, signature)
    assert plan.problem or plan.files
