"""Python models through the scheduler: execution, errors, loading and isolation."""

from __future__ import annotations

import gc
import json
import logging
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.backend_harness import Harness, HarnessAnswer, one_batch, rows, strings, tensor_specs
from tests.support.profiles import scaled

from conch.backends.python.runtime.python_instance import open_instance
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.placement import Placement
from conch.core.model_statistics import ModelStatistics
from conch.core.model_version import Model
from conch.core.padding import MadeInput, PaddedInput, PaddedOutput, Padding
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import BatchInput, InstanceGroup, TensorSpec
from conch.workers.python_backend import PythonBackend

INPUTS = tensor_specs(A=("FP32", (2,)))
OUTPUTS = tensor_specs(B=("FP32", (2,)))

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("B", pb_utils.get_input_tensor_by_name(request, "A").as_numpy())
            ])
            for request in requests
        ]
"""


@pytest.fixture(params=["in_process", "worker"])
def placement(request: pytest.FixtureRequest) -> str:
    """Models behave the same in both places."""
    return str(request.param)


def model_with(execute: str, before: str = "") -> str:
    """A model's file with this body of `execute`."""
    body = textwrap.indent(textwrap.dedent(execute).strip(), " " * 8)
    return (
        "import triton_python_backend_utils as pb_utils\nimport numpy as np\n\n"
        f"{before}\nclass TritonPythonModel:\n    def execute(self, requests):\n{body}\n"
    )


def load(harness: Harness, source: str, name: str = "m", **changes: Any) -> Model:
    harness.directory(name, {"1/model.py": source})
    return harness.load(
        PythonBackend(), harness.spec(name, **{"inputs": INPUTS, "outputs": OUTPUTS, **changes})
    )


def run_two(harness: Harness, source: str, **changes: Any) -> list[HarnessAnswer]:
    """Two requests in one batch."""
    model = load(harness, source, batching=one_batch(2), **changes)
    return harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=scaled(50))
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_every_request_gets_its_own_rows(harness: Harness, counts: list[int]) -> None:
    harness.directory("m", {"1/model.py": IDENTITY})
    spec = harness.spec(inputs=INPUTS, outputs=OUTPUTS)
    instance = open_instance(spec, Placement("m_0", "CPU"))
    inputs = [np.full((count, 2), number, np.float32) for number, count in enumerate(counts)]
    pairs = [harness.request({"A": array}) for array in inputs]
    batch = Batch([request for request, _ in pairs], sum(counts))
    Executor(spec, ModelStatistics(), lambda: 1).run(instance, batch)
    instance.close()
    for array, (_, answer) in zip(inputs, pairs, strict=True):
        np.testing.assert_array_equal(answer.array("B"), array)
    assert batch.bytes_copied == sum(array.nbytes for array in inputs)


def test_inputs_may_be_written_to(harness: Harness) -> None:
    source = model_with("""
        responses = []
        for request in requests:
            tensor = request.inputs()[0]
            array = tensor.as_numpy()
            array += 1
            assert tensor.as_numpy() is array
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("B", array)]))
        return responses
    """)
    model = load(harness, source)
    answer = harness.infer(model, {"A": rows(1)})
    assert answer.array("B").tolist() == [[2, 2]]
    assert answer.request is not None
    assert answer.request.inputs["A"].numpy().tolist() == [[1, 1]]


def test_strings_and_optional_inputs(harness: Harness) -> None:
    source = model_with("""
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "S")
            missing = pb_utils.get_input_tensor_by_name(request, "O") is None
            array = text.as_numpy()
            assert text.triton_dtype() == "TYPE_STRING" and array.dtype == np.object_
            out = np.array([[item.decode().upper() + str(missing)] for item in array[:, 0]], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("T", out)]))
        return responses
    """)
    inputs = (TensorSpec("S", "BYTES", (1,)), TensorSpec("O", "FP32", (1,), optional=True))
    model = load(harness, source, inputs=inputs, outputs=tensor_specs(T=("BYTES", (1,))))
    (tensor,) = harness.infer(model, {"S": strings("é".encode(), b"")}).one.outputs
    assert bytes(tensor.data) == b"\x06\0\0\0\xc3\x89True\x04\0\0\0True"
    (tensor,) = harness.infer(model, {"S": strings(b"x"), "O": rows(1, width=1)}).one.outputs
    assert bytes(tensor.data) == b"\x06\0\0\0XFalse"


def test_outputs_are_those_asked_for(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    source = model_with("""
        make = lambda name: pb_utils.Tensor(name, np.zeros((1, 2), np.float32))
        assert requests[0].requested_output_names() in ({"B", "C"}, {"C"})
        return [pb_utils.InferenceResponse([make("C"), make("B"), make("EXTRA")]) for _ in requests]
    """)
    model = load(harness, source, outputs=tensor_specs(B=("FP32", (2,)), C=("FP32", (2,))))
    for requested, names in ((None, ["C", "B"]), (("C",), ["C"])):
        answer = harness.infer(model, {"A": rows(1)}, requested=requested)
        assert [tensor.name for tensor in answer.one.outputs] == names
    dropped = [record for record in caplog.records if "'EXTRA', which is dropped" in record.getMessage()]
    assert len(dropped) == 1


def test_datatype_that_differs_from_the_config_passes_through(harness: Harness) -> None:
    source = model_with('return [pb_utils.InferenceResponse([pb_utils.Tensor("B", np.zeros((1, 1)))])]')
    (tensor,) = harness.infer(load(harness, source), {"A": rows(1)}).one.outputs
    assert (tensor.datatype, tensor.shape) == ("FP64", (1, 1))


def test_error_of_one_request_leaves_the_others_alone(harness: Harness) -> None:
    source = model_with("""
        good = pb_utils.InferenceResponse([pb_utils.Tensor("B", np.ones((1, 2), np.float32))])
        bad = pb_utils.InferenceResponse(
            error=pb_utils.TritonError("as it is", pb_utils.TritonError.INVALID_ARG)
        )
        return [bad, good]
    """)
    bad, good = run_two(harness, source)
    assert isinstance(bad.one.error, InvalidArgumentError)
    assert bad.error == "as it is"
    assert good.array("B").tolist() == [[1, 1]]


@pytest.mark.parametrize("code", range(8))
def test_codes_of_errors(harness: Harness, code: int) -> None:
    source = model_with(
        f'return [pb_utils.InferenceResponse(error=pb_utils.TritonError("m", code={code})) for _ in requests]'
    )
    error = harness.infer(load(harness, source), {"A": rows(1)}).one.error
    names = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG"]
    names += ["UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"]
    assert error is not None and error.code == names[code]


@pytest.mark.parametrize(
    ("execute", "message"),
    [
        ("return None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("return 3", "Expected a list in the execute return, found type '<class 'int'>'."),
        (
            "return []",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:0\n",
        ),
        (
            "return [None, None]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            "'<class 'NoneType'>'.",
        ),
        (
            'return [pb_utils.InferenceResponse([])] + ["x"]',
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            "'<class 'str'>'.",
        ),
        (
            "tensors = []\nresponse = pb_utils.InferenceResponse(tensors)\ntensors.append(1)\n"
            "return [response] * 2",
            "Expected a list of 'Tensor' objects in the output_tensors of an InferenceResponse, found an "
            "element of type '<class 'int'>'.",
        ),
    ],
)
def test_wrong_returns_fail_the_batch(harness: Harness, execute: str, message: str) -> None:
    answers = run_two(harness, model_with(execute))
    expected = f"Failed to process the request(s) for model 'm_0_0', message: {message}"
    assert [answer.error for answer in answers] == [expected, expected]


def test_what_no_response_can_have_is_told_at_the_model_s_line(harness: Harness) -> None:
    answers = run_two(harness, model_with("made = pb_utils.InferenceResponse([7])\nreturn [made] * 2"))
    expected = (
        "Failed to process the request(s) for model 'm_0_0', message: TypeError: Expected a list of 'Tensor' "
        "objects in the output_tensors of an InferenceResponse, found an element of type '<class 'int'>'."
        f"\n\nAt:\n  {harness.root / 'm/1/model.py'}(7): execute\n"
    )
    assert [answer.error for answer in answers] == [expected, expected]


@pytest.mark.parametrize("raised", ["ValueError", "SystemExit", "KeyboardInterrupt"])
def test_exception_in_execute(harness: Harness, raised: str, caplog: pytest.LogCaptureFixture) -> None:
    source = model_with(
        'if requests[0].request_id() == "bad":\n    helper("no")\nreturn [pb_utils.InferenceResponse()]',
        before=f"def helper(text):\n    raise {raised}(text)\n",
    )
    model = load(harness, source)
    answer = harness.infer(model, {"A": rows(1)}, id="bad")
    path = harness.root / "m" / "1" / "model.py"
    lines = path.read_text().splitlines()
    inner = next(number for number, line in enumerate(lines, 1) if "raise" in line)
    outer = next(number for number, line in enumerate(lines, 1) if "helper(" in line and "def" not in line)
    assert answer.error == (
        f"Failed to process the request(s) for model 'm_0_0', message: {raised}: no\n\nAt:\n"
        f"  {path}({inner}): helper\n  {path}({outer}): execute\n"
    )
    assert isinstance(answer.one.error, InternalError)
    assert f"{raised}: no" in caplog.text
    assert harness.infer(model, {"A": rows(1)}).one.error is None


def test_arguments_and_lifecycle(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = """
        import json
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.args = args

            def execute(self, requests):
                parameters = {"args": json.dumps(self.args), "dir": pb_utils.get_model_dir()}
                return [pb_utils.InferenceResponse([], parameters=parameters) for _ in requests]

            def finalize(self):
                pb_utils.Logger.log_info("finalized " + self.args["model_instance_name"])
                raise ValueError("only logged")
    """
    model = load(harness, source, instance_groups=(InstanceGroup("m_0", count=2),))
    parameters = harness.infer(model, {"A": rows(1)}).one.parameters
    assert parameters is not None
    args = json.loads(str(parameters["args"]))
    assert json.loads(args.pop("model_config")) == {"name": "m", "max_batch_size": 8}
    assert args.pop("model_instance_name") in ("m_0_0", "m_0_1")
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_repository": str(harness.root / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert parameters["dir"] == str(harness.root / "m" / "1")
    harness.close()
    assert "finalized m_0_0" in caplog.text and "finalized m_0_1" in caplog.text
    assert "only logged" in caplog.text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import nothing_like_this",
            "ModuleNotFoundError: No module named 'nothing_like_this'\n\nAt:\n  {path}(1): <module>\n",
        ),
        ("raise SystemExit(3)", "SystemExit: 3\n\nAt:\n  {path}(1): <module>\n"),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        ("class TritonPythonModel: pass", "Python model {path} does not implement `execute` method."),
        (
            "class TritonPythonModel:\n"
            "    def initialize(self, args):\n"
            "        raise RuntimeError('not today')\n"
            "    def execute(self, requests): pass\n",
            "RuntimeError: not today\n\nAt:\n  {path}(3): initialize\n",
        ),
    ],
)
def test_models_that_do_not_load(harness: Harness, source: str, message: str) -> None:
    with pytest.raises(InternalError) as caught:
        load(harness, source)
    assert caught.value.message == message.format(path=harness.root / "m" / "1" / "model.py")


def test_names_with_characters_of_shells(harness: Harness) -> None:
    backend, text = PythonBackend(), "^Invalid stub name: contains invalid characters: "
    for character in ";|&$`<>()[]{}\\\"'*?~#!":
        name = f"model{character}test"
        directory = harness.directory(name, {"1/model.py": model_with("return []")})
        groups = (InstanceGroup("fine"), InstanceGroup(name))
        with pytest.raises(InvalidArgumentError, match=text):
            backend.complete_config({"name": name}, directory / "1", {"placement": harness.placement})
        for refused in (harness.spec(name), harness.spec(instance_groups=groups)):
            for use in (backend.check, backend.load):
                with pytest.raises(InvalidArgumentError, match=text):
                    use(refused)


def test_missing_file(harness: Harness) -> None:
    harness.directory("m", {})
    with pytest.raises(UnavailableError) as caught:
        harness.load(PythonBackend(), harness.spec())
    path = harness.root / "m" / "1" / "model.py"
    assert caught.value.message == (
        f"Failed to preinitialize Python stub: Python model file not found in '{path}'"
    )


def test_second_instance_that_fails_closes_the_first(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    source = (
        IDENTITY
        + """
    def initialize(self, args):
        if args["model_instance_name"] == "m_0_1":
            raise ValueError("one is enough")

    def finalize(self):
        pb_utils.Logger.log_warn("closed")
"""
    )
    with pytest.raises(ConchError, match="one is enough"):
        load(harness, source, instance_groups=(InstanceGroup("m_0", count=2),))
    # Workers start side by side: the first one may have been stopped before it had anything to finalize.
    assert harness.placement == "worker" or "closed" in caplog.text


HELPED = """
import triton_python_backend_utils as pb_utils
import numpy as np
import helper
from .helper import WHO as RELATIVE
from shared.words import WHO as SHARED
import shared.words
from shared import *

class TritonPythonModel:
    def execute(self, requests):
        import helper as again
        import lazy
        assert again is helper and lazy.helper is helper
        helper.calls += 1
        parameters = {
            "who": " ".join([helper.WHO, RELATIVE, SHARED, shared.words.WHO, lazy.WHO, FROM_STAR]),
            "calls": helper.calls,
        }
        return [pb_utils.InferenceResponse([], parameters=parameters) for _ in requests]
"""


def test_models_have_their_own_helpers(harness: Harness) -> None:
    models = {}
    for name in ("a", "b"):
        harness.directory(
            name,
            {
                "1/helper.py": f"WHO = 'h{name}'\ncalls = 0\n",
                "1/lazy.py": f"import helper\nWHO = 'l{name}'\n",
                "shared/__init__.py": f"from . import words\nFROM_STAR = '*{name}'\n",
                "shared/words.py": f"WHO = 's{name}'\n",
            },
        )
        models[name] = load(harness, HELPED, name)
    for calls in (1, 2):
        for name, model in models.items():
            parameters = harness.infer(model, {"A": rows(1)}).one.parameters
            assert parameters is not None
            assert parameters["who"] == f"h{name} h{name} s{name} s{name} l{name} *{name}"
            assert parameters["calls"] == calls
    harness.close()
    assert "helper" not in sys.modules
    assert not list(harness.root.rglob("__pycache__"))


def test_installed_modules_come_before_a_models_own(harness: Harness) -> None:
    harness.directory("m", {"1/json.py": "raise ImportError", "1/numpy/__init__.py": "raise ImportError"})
    model = load(harness, "import json\n" + IDENTITY.replace("class", "import numpy\nclass"))
    assert harness.infer(model, {"A": rows(1)}).one.error is None


def test_imports_by_other_means_find_the_directories(harness: Harness) -> None:
    harness.directory("m", {"1/by_name.py": "VALUE = 5\n"})
    source = model_with(
        'return [pb_utils.InferenceResponse([], parameters={"v": importlib.import_module("by_name").VALUE})]',
        before="import importlib",
    )
    model = load(harness, source)
    assert harness.infer(model, {"A": rows(1)}).one.parameters == {"v": 5}


def test_reload_sees_the_new_file(harness: Harness) -> None:
    for value in (1, 2):
        harness.directory("m", {"1/helper.py": f"VALUE = {value}\n"})
        source = model_with(
            'return [pb_utils.InferenceResponse([], parameters={"v": helper.VALUE})]', before="import helper"
        )
        model = load(harness, source)
        assert harness.infer(model, {"A": rows(1)}).one.parameters == {"v": value}
        harness.close()


def test_reshape_of_the_config(harness: Harness) -> None:
    source = model_with("""
        array = requests[0].inputs()[0].as_numpy()
        assert array.shape == (2, 1), array.shape
        return [pb_utils.InferenceResponse([pb_utils.Tensor("B", array)])]
    """)
    model = load(
        harness,
        source,
        inputs=(TensorSpec("A", "FP32", (1, 1), reshape=(1,)),),
        outputs=(TensorSpec("B", "FP32", (1, 1), reshape=(1,)),),
    )
    assert harness.infer(model, {"A": np.ones((2, 1, 1), np.float32)}).array("B").shape == (2, 1, 1)


ASYNC = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        if requests[0].request_id() == "bad":
            raise SystemExit("stop")
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("B", request.inputs()[0].as_numpy())
        ]) for request in requests]
"""


def test_async_execute(harness: Harness) -> None:
    model = load(harness, ASYNC)
    for value in (1, 2):
        assert harness.infer(model, {"A": rows(value)}).array("B").tolist() == [[value, value]]
    error = harness.infer(model, {"A": rows(1)}, id="bad").error
    path = harness.root / "m" / "1" / "model.py"
    assert error.endswith(f"message: SystemExit: stop\n\nAt:\n  {path}(9): execute\n")
    assert harness.infer(model, {"A": rows(3)}).array("B").tolist() == [[3, 3]]


def complete(harness: Harness, body: str, **config: Any) -> dict[str, Any]:
    source = (
        IDENTITY
        + "    @staticmethod\n    def auto_complete_config(auto_complete_model_config):\n"
        + "        config = auto_complete_model_config\n"
        + "\n".join("        " + line for line in body.splitlines())
    )
    directory: Path = harness.directory("m", {"1/model.py": source})
    return PythonBackend().complete_config(
        {"name": "m", **config}, directory / "1", {"placement": harness.placement}
    )


FILL = """config.set_max_batch_size(4)
config.set_dynamic_batching()
config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [2], "optional": True})
config.add_output({"name": "B", "data_type": "TYPE_FP32", "dims": [2]})
config.set_model_transaction_policy({"decoupled": False})
return config"""


def test_auto_complete(harness: Harness) -> None:
    filled = {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [2], "optional": True}],
        "output": [{"name": "B", "data_type": "TYPE_FP32", "dims": [2]}],
        "model_transaction_policy": {"decoupled": False},
    }
    assert complete(harness, FILL) == filled
    assert complete(harness, FILL, **{key: value for key, value in filled.items() if key != "name"}) == filled
    partial = complete(harness, FILL, backend="python", input=[{"name": "A", "dims": [2]}])
    assert partial["input"] == filled["input"] and partial["backend"] == "python"


def test_parameters_that_a_model_sets(harness: Harness) -> None:
    body = 'config.set_parameter("KIND", "new")\nreturn config'
    old = {"parameters": {"OTHER": {"string_value": "old"}}}
    assert complete(harness, body, **old)["parameters"] == {
        "OTHER": {"string_value": "old"},
        "KIND": {"string_value": "new"},
    }
    with pytest.raises(InternalError, match="specified parameter 'KIND' as 'old', but auto-complete-config"):
        complete(harness, body, parameters={"KIND": {"string_value": "old"}})


def test_model_without_auto_complete_keeps_its_config(harness: Harness) -> None:
    directory = harness.directory("m", {"1/model.py": IDENTITY})
    config = {"name": "m", "max_batch_size": 2}
    assert (
        PythonBackend().complete_config(dict(config), directory / "1", {"placement": harness.placement})
        == config
    )


@pytest.mark.parametrize(
    ("body", "config", "message"),
    [
        (
            "config.set_max_batch_size(4)",
            {"max_batch_size": 6},
            "configuration specified max_batch_size 6, but in auto-complete-config function for model 'm' "
            "specified max_batch_size 4",
        ),
        (
            "config.set_dynamic_batching()",
            {"sequence_batching": {}},
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config "
            "function for model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
        (
            'config.set_model_transaction_policy({"decoupled": True})',
            {"model_transaction_policy": {"decoupled": False}},
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set "
            "to 'False'.",
        ),
        (
            'config.set_model_transaction_policy({"coupled": True})',
            {},
            "model transaction property in auto-complete-config function for model 'm' contains property "
            "other than 'decoupled'.",
        ),
        (
            'config.add_input({"name": "A", "dims": [1]})',
            {},
            "input 'A' in auto-complete-config function for model 'm' is missing 'data_type' property.",
        ),
        (
            'config.add_output({"name": "A", "data_type": "TYPE_FP32"})',
            {},
            "output 'A' in auto-complete-config function for model 'm' is missing 'dims' property.",
        ),
        (
            'config.add_input({"data_type": "TYPE_FP32", "dims": [1]})',
            {},
            "input in auto-complete-config function for model 'm' is missing 'name' property.",
        ),
        (
            'config.add_input({"name": "A", "is_nice": True})',
            {},
            "input 'A' in auto-complete-config function for model 'm' contains property other than 'name', "
            "'data_type', 'dims' and 'optional'.",
        ),
        (
            'config.add_output({"name": "A", "optional": True})',
            {},
            "output 'A' in auto-complete-config function for model 'm' contains property other than 'name', "
            "'data_type' and 'dims'.",
        ),
        (
            'config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4]})',
            {"input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [16]}]},
            "model 'm', tensor 'A': the model expects dims [4] but the model configuration specifies dims "
            "[16]",
        ),
        (
            'config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4], "optional": True})',
            {"input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [4], "optional": False}]},
            "model 'm', tensor 'A': the model expects optional True but the model configuration specifies "
            "optional False",
        ),
        (
            'config.add_output({"name": "A", "data_type": "TYPE_FP32", "dims": [4]})',
            {"output": [{"name": "A", "data_type": "TYPE_INT32", "dims": [4]}]},
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for output 'A', model "
            "provides TYPE_FP32",
        ),
    ],
)
def test_auto_complete_conflicts(harness: Harness, body: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InternalError) as caught:
        complete(harness, body + "\nreturn config", **config)
    text, _, frames = caught.value.message.partition("\n\nAt:\n")
    assert text == f"ValueError: {message}"
    assert frames.endswith(": auto_complete_config\n")


def test_auto_complete_must_return_the_config(harness: Harness) -> None:
    with pytest.raises(InternalError) as caught:
        complete(harness, "return {}")
    assert caught.value.message == (
        "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."
    )


def test_array_types_are_checked_when_the_tensor_is_made(harness: Harness) -> None:
    model = load(harness, model_with('pb_utils.Tensor("B", np.zeros(1, complex))'))
    error = harness.infer(model, {"A": rows(1)}).error
    assert "TritonModelException: tensor 'B': arrays of dtype complex128" in error


def test_padded_inputs_can_be_joined_and_outputs_are_cut_back(harness: Harness) -> None:
    source = model_with(
        """
        names = [tensor.name() for tensor in requests[0].inputs()]
        assert names == ["A", "LENGTHS", "MASK"], names
        joined = [
            np.concatenate([pb_utils.get_input_tensor_by_name(r, name).as_numpy() for r in requests])
            for name in names
        ]
        assert joined[0].shape == (2, 4), joined[0].shape
        sums = (joined[0] * joined[2]).sum(axis=1)
        assert joined[1].tolist() == [1, 3]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("B", joined[0][i : i + 1] + sums[i])])
            for i in range(2)
        ]
        """
    )
    rule = PaddedInput("A", 0, (4,), 0, 9.0, MadeInput("LENGTHS"), MadeInput("MASK"))
    model = load(
        harness,
        source,
        inputs=tensor_specs(A=("FP32", (-1,))),
        outputs=tensor_specs(B=("FP32", (-1,))),
        padding=Padding((rule,), (PaddedOutput("B", 0, "A", 0),)),
        batching=one_batch(2),
    )
    answers = harness.batch(model, [{"A": np.array([values], np.float32)} for values in ([1], [2, 3, 4])])
    assert [answer.array("B").tolist() for answer in answers] == [[[2]], [[11, 12, 13]]]


def test_ragged_requests_share_a_batch_and_come_as_they_are(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    source = model_with(
        """
        assert len(requests) == 2
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("B", pb_utils.get_input_tensor_by_name(request, "A").as_numpy())
            ])
            for request in requests
        ]
        """
    )
    model = load(
        harness,
        source,
        inputs=(TensorSpec("A", "FP32", (-1,), ragged=True),),
        outputs=tensor_specs(B=("FP32", (-1,))),
        batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("N",), "INT32", "A"),),
        batching=one_batch(2),
    )
    assert "'batch_input' and 'batch_output' have no effect" in caplog.text
    answers = harness.batch(model, [{"A": np.array([values], np.float32)} for values in ([1], [2, 3, 4])])
    assert [answer.array("B").tolist() for answer in answers] == [[[1]], [[2, 3, 4]]]


def test_names_of_tritons_extension_module(harness: Harness) -> None:
    source = (
        IDENTITY.replace(
            "import triton",
            "import c_python_backend_utils\n"
            "from c_python_backend_utils import InferenceRequest, InferenceResponse, Tensor\n"
            "import triton",
            1,
        )
        .replace("pb_utils.Tensor(", "Tensor(")
        .replace("pb_utils.InferenceResponse(", "InferenceResponse(")
    )
    assert harness.infer(load(harness, source), {"A": rows(1)}).array("B").tolist() == [[1, 1]]


def test_modules_may_come_while_those_of_a_model_go(harness: Harness) -> None:
    """A collection runs code of others in the middle of anything, and other threads import meanwhile."""
    harness.directory(
        "m", {"1/model.py": "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"}
    )
    model = PythonBackend().load(harness.spec())
    instance = model.create_instance(Placement("m_0", "CPU"))
    added: list[str] = []

    def adds_a_module(phase: str, info: dict[str, int]) -> None:
        added.append(f"added_by_a_collection_{len(added)}")
        sys.modules[added[-1]] = ModuleType(added[-1])

    threshold = gc.get_threshold()
    gc.callbacks.append(adds_a_module)
    gc.set_threshold(1)
    try:
        instance.close()
        model.close()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(adds_a_module)
        for name in added:
            del sys.modules[name]
    assert added
