"""`triton_python_backend_utils.pyi`: it says what the module has, and typical models pass `mypy --strict`."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import c_python_backend_utils
import pytest
import triton_python_backend_utils as pb_utils

from conch.backends.python.api import pb_utils as implementation

ROOT = Path(__file__).resolve().parents[4]
STUB = ROOT / "services/triton_python_backend_utils.pyi"

Function = ast.FunctionDef | ast.AsyncFunctionDef

MODEL = '''
"""A model as they are written."""
import json
from collections.abc import AsyncIterator, Iterator

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(8)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "B")
        assert output is not None
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.family = pb_utils.MetricFamily("seen", "how many", pb_utils.MetricFamily.COUNTER)
        self.seen = self.family.Metric(labels={"model": args["model_name"]})

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "A")
            if tensor is None:
                error = pb_utils.TritonError("no A", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            array = tensor.as_numpy().astype(self.dtype)
            other = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("A", array)], ["B"], "other").exec()
            if other.has_error():
                message = other.error()
                assert message is not None
                raise pb_utils.TritonModelException(message.message())
            for each in pb_utils.InferenceRequest("", 0, [], ["B"], "other").exec(decoupled=True):
                pb_utils.Logger.log_info(str(each.output_tensors()[0].shape()))
            self.seen.increment(1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("B", np.square(array))]))
        return responses


class Streaming:
    async def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> AsyncIterator[list[pb_utils.InferenceResponse]]:
        asked = pb_utils.InferenceRequest("id", model_name="other", requested_output_names=["B"], inputs=[])
        other = await asked.async_exec()
        yield [other for _ in requests]
        sender = requests[0].get_response_sender()
        if not sender.is_cancelled():
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

WRONG = """
import triton_python_backend_utils as pb_utils

request = pb_utils.InferenceRequest("id", 7, [], [], "m")
tensor: pb_utils.Tensor = pb_utils.get_input_tensor_by_name(request, "A")
pb_utils.Tensor("A", [1, 2])
request.exec().cancel()
pb_utils.InferenceRequest("m", [], [])
"""


def definitions(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Definitions by name; overloads have several."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.setdefault(statement.target.id, []).append(statement)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found.setdefault(statement.targets[0].id, []).append(statement)
    return found


def stub() -> ast.Module:
    return ast.parse(STUB.read_text())


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def parameters(function: Function) -> list[tuple[str, bool]]:
    """Names, and whether there is a default."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    found = [(argument.arg, index >= without) for index, argument in enumerate(positional)]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, default is not None))
    if arguments.kwarg is not None:
        found.append((arguments.kwarg.arg, False))
    return found


def real_parameters(function: Any) -> list[tuple[str, bool]]:
    return [
        (name, each.default is not each.empty)
        for name, each in inspect.signature(function).parameters.items()
    ]


def functions() -> Iterator[Any]:
    """Every function and method of the stub, with the real one."""
    for name, (first, *_) in definitions(stub().body).items():
        if isinstance(first, Function):
            yield pytest.param([first], getattr(pb_utils, name), id=name)
        elif isinstance(first, ast.ClassDef) and not name.startswith("_"):
            real = getattr(pb_utils, name)
            for method, overloads in definitions(first.body).items():
                if isinstance(overloads[0], Function):
                    yield pytest.param(overloads, inspect.getattr_static(real, method), id=f"{name}.{method}")


@pytest.mark.parametrize(("declared", "real"), list(functions()))
def test_functions_are_what_they_are(declared: list[Function], real: Any) -> None:
    wanted = real_parameters(real.__func__ if isinstance(real, staticmethod) else real)
    for function in declared:
        static = any(
            isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list
        )
        assert static is isinstance(real, staticmethod)
        names = parameters(function)
        if len(declared) == 1:
            assert names == wanted
        else:  # one of several ways to call it
            assert [name for name, _ in names] == [name for name, _ in wanted]


def test_the_module_is_the_backends() -> None:
    assert pb_utils.__all__ == implementation.__all__
    assert all(getattr(pb_utils, name) is getattr(implementation, name) for name in pb_utils.__all__)


def test_names_are_what_there_is() -> None:
    found = definitions(stub().body)
    (listed,) = found.pop("__all__")
    assert isinstance(listed, ast.Assign)
    assert ast.literal_eval(listed.value) == pb_utils.__all__
    assert public(found) == set(pb_utils.__all__)


@pytest.mark.parametrize(
    "name", [name for name in pb_utils.__all__ if inspect.isclass(getattr(pb_utils, name))]
)
def test_members_are_what_there_is(name: str) -> None:
    (declared,) = definitions(stub().body)[name]
    assert isinstance(declared, ast.ClassDef)
    real = getattr(pb_utils, name)
    outside = {member for base in real.__mro__[1:] for member in vars(base)}
    assert public(definitions(declared.body)) == public(vars(real)) - (outside - public(vars(real)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of mypy for numpy and the standard library."""
    return tmp_path_factory.mktemp("mypy")


def checked(path: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Result of mypy for a file, with nothing of conch in its path but the stub."""
    pytest.importorskip("mypy")
    only = path.parent / "only"
    only.mkdir()
    (only / STUB.name).write_text(STUB.read_text())
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            f"--cache-dir={cache}",
            path,
        ],
        env={"MYPYPATH": str(only), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.process
def test_a_typical_model_passes(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    result = checked(tmp_path / "model.py", cache)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.process
def test_mistakes_are_found(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.py").write_text(WRONG)
    lines = checked(tmp_path / "model.py", cache).stdout.splitlines()
    assert [line.rpartition("[")[2] for line in lines[:4]] == [
        *("assignment]", "arg-type]", "attr-defined]", "call-overload]"),
    ]


def test_it_is_shipped() -> None:
    """Under both names: type checkers do not agree on where the stub of a single module belongs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert (
        shipped["services/triton_python_backend_utils.pyi"]
        == "triton_python_backend_utils-stubs/__init__.pyi"
    )
    assert shipped["services/c_python_backend_utils.py"] == "c_python_backend_utils.py"
    assert shipped["services/c_python_backend_utils.pyi"] == "c_python_backend_utils-stubs/__init__.pyi"


def test_the_extension_module_has_the_same_objects() -> None:
    """Some models import from Triton's extension module what `triton_python_backend_utils` has."""
    for name in c_python_backend_utils.__all__:
        if hasattr(pb_utils, name):
            assert getattr(c_python_backend_utils, name) is getattr(pb_utils, name)
    own = {"COUNTER", "GAUGE", "HISTOGRAM", "InferenceResponseSender", "Metric"}
    assert own == {name for name in c_python_backend_utils.__all__ if not hasattr(pb_utils, name)}
    family = c_python_backend_utils.MetricFamily("f", "a family", c_python_backend_utils.GAUGE)
    assert type(family.Metric()) is c_python_backend_utils.Metric
    assert c_python_backend_utils.InferenceResponseSender is pb_utils.ResponseSender


def test_types_of_the_extension_module() -> None:
    body = ast.parse(STUB.with_name("c_python_backend_utils.pyi").read_text()).body
    imported = {each.asname for part in body if isinstance(part, ast.ImportFrom) for each in part.names}
    assert imported | {name for name in definitions(body) if name != "__all__"} == set(
        c_python_backend_utils.__all__
    )
