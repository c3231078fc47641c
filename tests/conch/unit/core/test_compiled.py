"""The build that is asked for runs, and programs see the same of the compiled one as of pure Python."""

from __future__ import annotations

import os
import tomllib
import traceback
from importlib import import_module
from typing import Any

import pytest
from tests.support.servers import ROOT

from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.compiled import build
from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_cache.base import ResponseCache
from conch.core.tensor import Buffer, Tensor
from conch.frontends.grpc.response_encoder import ResponseEncoder
from conch.frontends.http.chat_route import ChatRoute
from conch.frontends.http.http_exchange import ExchangeHooks, HttpExchange
from conch.frontends.http.route_provider import RouteProvider
from conch.parts.server_part import ServerPart
from conch.server_options import AddOnSettings
from conch.workers.environment import OwnEnvironment
from conch_control.lifecycle.residency import Residency, ResidencyKind
from conch_control.lifecycle.rollouts import Rollouts

HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
MODULES = HOOK["hooks"]["custom"]["modules"]
PUBLIC = (
    *(Backend, BackendInstance, BackendModel, Tensor, InferenceRequest, InferenceResponse),
    *(ServerPart, AddOnSettings, RouteProvider, ChatRoute, HttpExchange, ExchangeHooks),
    *(OwnEnvironment, ResponseCache, Residency, ResidencyKind, Rollouts),
)
"""Classes that add-ons and other programs derive from; docs/internals/compiled.md."""


@pytest.mark.parametrize("name", MODULES)
def test_the_listed_modules_are_compiled_in_the_compiled_build_alone(name: str) -> None:
    asked = os.environ.get("CONCH_TEST_BUILD", "pure")
    module = import_module(name)
    if hasattr(module, "__path__"):
        names = [path.stem for path in (ROOT / "services" / name.replace(".", "/")).glob("[!_]*.py")]
        files = [import_module(f"{name}.{each}").__file__ for each in names]
    else:
        files = [module.__file__]
    assert build() == asked
    assert {str(file).endswith(".so") for file in files} == {asked == "compiled"}


def test_the_compiler_is_the_one_that_checks() -> None:
    (pinned,) = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("mypy==")
    ]
    assert pinned.replace("mypy", "mypy[mypyc]") in HOOK["hooks"]["custom"]["dependencies"]


@pytest.mark.parametrize("base", PUBLIC)
def test_programs_derive_from_public_classes(base: type[Any]) -> None:
    body: dict[str, Any] = {
        name: lambda self, *given: None for name in getattr(base, "__abstractmethods__", ())
    }
    derived: Any = type("Derived", (base,), {**body, "added": lambda self: "added"})
    made = derived.__new__(derived)
    made.own = 1
    assert (made.added(), made.own, isinstance(made, base)) == ("added", 1, True)


def test_what_a_derived_class_overrides_is_called_from_compiled_code() -> None:
    class Late(Tensor):
        """Its bytes are made when they are asked for."""

        @property
        def data(self) -> Buffer:
            return b"made"

    class Model:
        spec, version_text = type("Spec", (), {"name": "m"}), "1"

    request = InferenceRequest("m", "", {}, lambda *given: None, 0)
    request.model = Model()  # type: ignore[assignment]  # all that the encoder reads
    message = ResponseEncoder().message(request, InferenceResponse([Late("x", "INT8", (4,), b"set.")]))
    assert message.endswith(b"made") and b"set." not in message


def test_tracebacks_name_file_line_and_function() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Tensor("x", "FP32", (3,), bytes(4)).numpy()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename.endswith("conch/core/tensor.py") and frame.name == "numpy"
    lines = (ROOT / "services" / "conch" / "core" / "tensor.py").read_text().splitlines()
    assert lines[(frame.lineno or 0) - 1].strip().startswith("raise InvalidArgumentError(")
