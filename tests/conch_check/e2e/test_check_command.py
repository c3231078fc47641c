"""`conch check` as a process: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import CONCH, EXAMPLES, WAIT_S, copy_example, write_model

from conch.backends.python.python_settings import PARAMETERS
from conch.cli import main

CONFIG = """backend: "python"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 0 ] }
output { name: "Y" data_type: TYPE_FP33 dims: 1 }
"""
MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
COMPLETING = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("completing")
        config.set_max_batch_size(3)
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        return []
"""


def check(*arguments: str | Path) -> tuple[int, str, str]:
    command = [str(CONCH), "check", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout, result.stderr


def test_the_examples_are_clean() -> None:
    code, output, errors = check(EXAMPLES, "--strict", "--run-code")
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == f"{len(list(EXAMPLES.iterdir()))} models checked: no problems"
    assert "digits: ok, version 1" in output


def test_problems_are_printed_with_their_places(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG, {"model.py": MODEL})
    code, output, errors = check(tmp_path)
    assert (code, errors) == (1, "")
    file = tmp_path / "m" / "config.pbtxt"
    assert output == (
        f"{file}:3:51: error: input[0].dims[1]: model input 'X' dimension must be integer >= 1, or -1 to "
        f"indicate a variable-size dimension for m\n"
        f"    expected at least 1, or -1 for a variable one; found 0\n"
        f'{file}:4:31: error: output[0].data_type: Enum type "inference.DataType" has no value named '
        f"TYPE_FP33.\n"
        f"    expected one of TYPE_BOOL, TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, "
        f"TYPE_INT16, TYPE_INT32, TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_STRING, TYPE_BF16; found "
        f"'TYPE_FP33'; did you mean 'TYPE_FP32'?\n"
        f"m: 2 errors\n"
        f"1 model checked: 2 errors\n"
    )


def test_json(tmp_path: Path) -> None:
    write_model(tmp_path, "m", CONFIG, {"model.py": MODEL})
    copy_example(tmp_path, "simple")
    code, output, errors = check(tmp_path, "--json", "--show-config")
    assert (code, errors) == (1, "")
    report: dict[str, Any] = json.loads(output)
    broken, simple = report.pop("models")
    assert report == {
        "format": 1,
        "clean": False,
        "errors": 2,
        "warnings": 0,
        "repositories": [str(tmp_path)],
        "unreadable": {},
    }
    assert broken["findings"][0] == {
        "severity": "error",
        "file": str(tmp_path / "m" / "config.pbtxt"),
        "line": 3,
        "column": 51,
        "path": "input[0].dims[1]",
        "message": "model input 'X' dimension must be integer >= 1, or -1 to indicate a variable-size "
        "dimension for m",
        "expected": "at least 1, or -1 for a variable one",
        "found": "0",
        "nearest": "",
    }
    assert {
        key: simple[key] for key in ("name", "location", "versions", "errors", "warnings", "findings")
    } == {
        "name": "simple",
        "location": str(tmp_path / "simple"),
        "versions": [1],
        "errors": 0,
        "warnings": 0,
        "findings": [],
    }
    assert simple["config"]["max_batch_size"] == 8
    assert simple["origins"]["max_batch_size"] == "config.pbtxt"


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(
        tmp_path,
        "m",
        'backend: "python" parameters { key: "CONCH_X" value {} } '
        'input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }',
        {"model.py": MODEL},
    )
    assert main(["check", str(tmp_path)]) == 0
    assert main(["check", str(tmp_path), "--strict"]) == 1
    capsys.readouterr()
    for arguments, text in (
        ([], "the following arguments are required: REPO"),
        ([tmp_path, "--nonsense"], "unrecognized arguments: --nonsense"),
        ([tmp_path / "none"], "repository path is not a valid directory"),
        ([tmp_path, "--model", "n"], "no repository has a model 'n'"),
        ([tmp_path, "--gpus", "x"], "--gpus: expected numbers"),
        ([tmp_path, "--backend-config", "x"], "--backend-config"),
        (["hdfs://bucket"], "hdfs://bucket"),
    ):
        assert main(["check", *map(str, arguments)]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert text in errors
    assert main(["check", "--help"]) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_repository_that_can_not_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    try:
        assert check(tmp_path)[0] == 2
    finally:
        tmp_path.chmod(0o700)


def test_code_of_models_runs_only_when_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, "m", 'backend: "python"', {"model.py": COMPLETING})
    code, output, errors = check(tmp_path, "--show-config")
    assert (code, errors) == (0, "")
    assert "note: the config is not completed: that would run the model's own code" in output
    assert "max_batch_size" not in output
    code, output, errors = check(tmp_path, "--show-config", "--run-code", "--strict")
    assert (code, errors) == (0, "m: completing\n")
    assert "max_batch_size: 3" in output
    assert "# model" in output
    assert "completing" not in output


def test_python_files_that_do_not_compile(tmp_path: Path) -> None:
    write_model(tmp_path, "m", 'backend: "python"', {"model.py": "class A:\n  def f(:\n"})
    code, output, _ = check(tmp_path)
    assert code == 1
    assert f"{tmp_path / 'm' / '1' / 'model.py'}:2:9: error: SyntaxError: invalid syntax" in output


def test_configs_are_compared_with_onnx_models(tmp_path: Path) -> None:
    for name, old, new in (
        ("a", 'name: "INPUT1"', 'name: "INPUT_1"'),
        ("b", "data_type: TYPE_INT32", "data_type: TYPE_INT64"),
        ("c", "dims: [ 16 ]", "dims: [ 17 ]"),
    ):
        file = copy_example(tmp_path, "simple", name) / "config.pbtxt"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
    code, output, _ = check(tmp_path, "--json")
    assert code == 1
    findings = [finding for model in json.loads(output)["models"] for finding in model["findings"]]
    assert [(each["path"], each["line"], each["message"].partition(":")[0]) for each in findings] == [
        ("input[1]", 10, "unexpected inference input 'INPUT_1', allowed inputs are"),
        (
            "input[0]",
            5,
            "unable to load model 'b', configuration expects datatype TYPE_INT64 for input 'INPUT0', model "
            "provides TYPE_INT32",
        ),
        ("input[0]", 5, "model 'c', tensor 'INPUT0'"),
    ]


def test_imports_only_the_backends_that_are_needed(tmp_path: Path) -> None:
    copy_example(tmp_path, "add_sub_python")
    code = (
        "import sys; from conch.cli import main; code = main(['check', sys.argv[1]]); "
        "assert 'onnxruntime' not in sys.modules; sys.exit(code)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, timeout=WAIT_S, capture_output=True
    )


def test_an_extra_that_is_not_installed(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    code = (
        "import sys; sys.modules['onnxruntime'] = None; from conch.cli import main; "
        "sys.exit(main(['check', sys.argv[1]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == 1
    file = tmp_path / "simple" / "config.pbtxt"
    assert f"{file}:2:10: error: backend: backend 'onnxruntime' needs" in result.stdout
    assert "pip install 'conch[onnxruntime]'" in result.stdout


def test_five_hundred_models(tmp_path: Path) -> None:
    config = (EXAMPLES / "add_sub_python" / "config.pbtxt").read_text()
    for number in range(500):
        name = f"model_{number}"
        text = config.replace("add_sub_python", name)
        write_model(tmp_path, name, text + ("max_batch: 1" if number % 50 == 0 else ""), {"model.py": MODEL})
    code, output, _ = check(tmp_path)
    assert code == 1
    assert output.splitlines()[-1] == "500 models checked: 10 errors"


@pytest.mark.parametrize("listed", [True, False])
def test_no_library_of_a_config_runs_without_the_flag(tmp_path: Path, listed: bool) -> None:
    tensors = "".join(
        f'{kind} {{ name: "X" data_type: TYPE_FP32 dims: 1 }}\n' for kind in ("input", "output") if listed
    )
    extension = 'parameters { key: "CPU_EXTENSION_PATH" value { string_value: "/none.so" } }\n'
    openvino = f'backend: "openvino" {extension}'
    onnx = 'backend: "onnxruntime" model_operations { op_library_filename: "ops.so" }\n'
    write_model(tmp_path, "openvino", openvino + tensors, {"model.xml": "<net/>"})
    directory = write_model(tmp_path, "onnx", onnx + tensors, {"model.onnx": ""})
    (directory / "1/ops.so").write_bytes(b"no library")
    tried = ("loading custom CPU extensions", "ops.so' of model")
    _, output, _ = check(tmp_path)
    assert output.count("note: ") == 2 and output.count("the model is not read: that would run") == 2
    assert not any(each in output for each in tried)
    _, output, _ = check(tmp_path, "--run-code")
    assert "the model is not read" not in output and tried[0] in output


def test_models_of_others_can_be_held_to_data(tmp_path: Path) -> None:
    for name, engine, key in (("harmless", "fil", "threshold"), ("harmful", "openvino", "CACHE_DIR")):
        text = f'backend: "{engine}" parameters {{ key: "{key}" value {{ string_value: "1" }} }}'
        write_model(tmp_path, name, text, {})
    write_model(tmp_path, "m", CONFIG, {"model.py": MODEL})
    (tmp_path / "harmless/1/extra.so.2").write_text("")
    _, before, _ = check(tmp_path)
    assert "the model brings" not in before
    code, output, _ = check(tmp_path, "--data-only")
    said = sorted(line.partition(" error: ")[2] for line in output.splitlines() if "brings" in line)
    assert code == 1
    assert said == [
        "backend: the model brings files that can be code (backend 'python' of its config)",
        "parameters[\"CACHE_DIR\"]: the model brings a directory to write to (parameter 'CACHE_DIR' of its "
        "config)",
        "the model brings code ('1/extra.so.2')",
        "the model brings code ('1/model.py')",
    ]


def test_parameters_and_imports_of_python_models(tmp_path: Path) -> None:
    names = [*PARAMETERS[:-1], "CONCH_ENV_MODE", "CONCH_PLACEMNT"]
    values = {"CONCH_PLACEMENT": "worker", "CONCH_STRICT_OUTPUTS": "true"}
    parameters = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{values.get(name, "5")}" }} }}\n'
        for name in names
    )
    config = CONFIG.replace("[ 1, 0 ]", "[ 1 ]").replace("TYPE_FP33", "TYPE_FP32") + parameters
    source = "import json, own_module\nimport not_installed.part\n"
    source += "try:\n    import optional\nexcept ImportError:\n    pass\n"
    write_model(tmp_path, "m", config, {"model.py": source + MODEL, "own_module.py": ""})
    code, output, _ = check(tmp_path)
    warnings = [line.partition("warning: ")[2] for line in output.splitlines() if "warning: " in line]
    assert (code, len(warnings)) == (0, 2), output
    assert warnings[0].startswith("model.py:2: imports 'not_installed', which is not installed")
    assert warnings[1].startswith('parameters["CONCH_PLACEMNT"]')
    assert "did you mean 'CONCH_PLACEMENT'?" in output
    (tmp_path / "m" / "requirements.txt").write_text("not_installed\n")
    assert "imports '" not in check(tmp_path)[1]
