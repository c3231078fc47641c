"""Examples of the documentation work as they stand there."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.waiting import PATIENCE_S

import conch
from conch.backends.arrays import ArrayBackend
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_cache.base import ResponseCache
from conch.core.spec import InstanceGroup, ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch_control.config.model_spec import build_spec
from conch_control.config.parse import parse_config
from conch_control.config.problems import raise_first
from conch_control.config.ragged import ragged_problems
from conch_control.config.validate import check_supported, config_problems, tensor_problems

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"


def test_the_backend_of_the_documentation_serves(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (_DOCS / "backends" / "writing.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code[0], namespace)
    backend = namespace["ScaleBackend"]()
    assert isinstance(backend, ArrayBackend)
    (tmp_path / "factor.txt").write_text("2.5")
    spec = ModelSpec(
        name="scale",
        version=1,
        platform="",
        backend="scale",
        max_batch_size=4,
        inputs=(TensorSpec("INPUT", "FP32", (2,)),),
        outputs=(TensorSpec("OUTPUT", "FP32", (2,)),),
        directory=tmp_path,
        version_directory=tmp_path,
        model_file="factor.txt",
        instance_groups=(InstanceGroup("scale"),),
    )
    answers: list[InferenceResponse | None] = []
    model = Model.create(spec, backend.load(spec))
    try:
        tensor = Tensor.from_array("INPUT", np.array([[1, 2]], np.float32))
        request = InferenceRequest("scale", "", {"INPUT": tensor}, lambda _, r, final: answers.append(r), 0)
        runner = model.submit(request, may_claim=True)
        assert runner is not None
        runner.run_inline()
    finally:
        model.close()
    (answer,) = answers
    assert answer is not None
    assert answer.error is None
    assert answer.outputs[0].numpy().tolist() == [[2.5, 5.0]]


def test_the_configs_of_the_batching_page_load(tmp_path: Path) -> None:
    snippets = re.findall(r"```pbtxt\n(.*?)```", (_DOCS / "batching.md").read_text(), re.DOTALL)
    assert len(snippets) == 4
    for snippet in snippets:
        config = parse_config(f'name: "m" {snippet}', "docs/batching.md")
        config.backend = config.backend or "onnxruntime"
        raise_first(config_problems(config))
        raise_first(tensor_problems(config))
        raise_first(ragged_problems(config))
        check_supported(config)
        spec = build_spec(config, tmp_path, 1, "model.onnx", {})
        assert spec.batching or spec.max_queue_size == 200


def test_the_retry_policy_of_the_batching_page_is_one_for_grpc() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", (_DOCS / "batching.md").read_text(), re.DOTALL)
    (method,) = json.loads(text)["methodConfig"]
    with grpc.insecure_channel("127.0.0.1:1", [("grpc.service_config", text)]) as channel:
        path = f"/{method['name'][0]['service']}/{method['name'][0]['method']}"
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(path)(b"", timeout=PATIENCE_S)
    # A policy that gRPC does not understand is an error of its own, and no call is tried.
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE, raised.value.details()


def test_the_cache_of_the_documentation_keeps_entries() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (_DOCS / "cache.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    cache = namespace["LastFew"]({"entries": "2"})
    assert isinstance(cache, ResponseCache)
    for key in (b"a", b"b", b"c"):
        assert cache.insert(key, key * 2, 0)
    assert [cache.lookup(key) for key in (b"a", b"b", b"c")] == [None, b"bb", b"cc"]


def test_the_python_api_page_names_all_there_is() -> None:
    text = (_DOCS / "python-api.md").read_text()
    names = [name for name in conch.__all__ if not name.endswith(("Error", "__"))]  # type: ignore[attr-defined]
    assert [name for name in (*names, *_public(conch.Server)) if name not in text] == []


_CLIENTS = {
    "go": "go/main.go",
    "java": "java/Client.java",
    "cpp": "cpp/client.cc",
    "js": "node/client.js",
    "rust": "rust/src/main.rs",
    "csharp": "csharp/Client.cs",
}


def test_the_code_of_the_clients_page_is_that_of_the_clients() -> None:
    """The page has no code of its own but Python's, which tests/conch/e2e/test_examples.py runs."""
    text = (_DOCS / "clients.md").read_text()
    shown = dict(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
    assert shown.keys() == {*_CLIENTS, "python", "console"}
    for language, name in _CLIENTS.items():
        lines = [line.strip() for line in (_ROOT / "examples" / "clients" / name).read_text().splitlines()]
        assert "\n".join(line.strip() for line in shown[language].splitlines()) in "\n".join(lines), name


# Files of users and of builds.
_FOREIGN = frozenset(
    {
        "Minference/grpc_service.proto",
        "backends/NAME/model.py",
        "dist/",
        "file.py",
        "helper.py",
        "m/1/",
        "reproduce.sh",
    }
)
_PAGES = (
    *(_ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted(_DOCS.rglob("*.md")),
)
_FOLDERS = ("services", "control", "proto", "scripts", "bench", "tests", "deploy", "examples", "docs")
_FILE = re.compile(r"(?<![\w./:<>$*-])([\w-]+(?:/[\w.-]+)*\.(?:pyi?|proto|sh|yml))(?![\w/*])")
_FOLDER = re.compile(r"`((?:[\w-]+/)+)`")


def _exists(mention: str) -> bool:
    paths = _files()
    if mention.endswith("/"):
        return any(f"/{mention}" in f"/{path}" for path in paths)
    return any(f"/{path}".endswith(f"/{mention}") for path in paths)


@functools.cache
def _files() -> tuple[str, ...]:
    files = [path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*") if path.is_file()]
    return tuple(str(path.relative_to(_ROOT)) for path in (*files, *_ROOT.glob("*.*")))


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_files_named_by_a_page_exist(page: Path) -> None:
    """A mention is the end of a path: `core/admission.py` is `services/conch/core/admission.py`."""
    text = page.read_text()
    mentions = {*_FILE.findall(text), *_FOLDER.findall(text)} - _FOREIGN
    assert sorted(mention for mention in mentions if not _exists(mention)) == []


def test_classes_named_by_the_internals_exist() -> None:
    pages = (_ROOT / "ARCHITECTURE.md", *_DOCS.rglob("internals/*.md"))
    names = {name for page in pages for name in re.findall(r"`([A-Z]\w*[a-z]\w*)[`.]", page.read_text())}
    code = "".join(
        path.read_text() for folder in ("services", "control") for path in (_ROOT / folder).rglob("*.py")
    )
    assert sorted(names - set(re.findall(r"^ *class (\w+)", code, re.MULTILINE))) == []


def test_make_commands_of_the_pages_exist() -> None:
    rules = re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {name for page in _PAGES for name in re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text())}
    assert {"test", "docs"} <= named <= set(rules)


def _public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]
