"""Dependencies point inward: read from the sources' own import statements."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "services", ROOT / "control")

FRAMEWORKS = frozenset({"onnxruntime", "torch", "tensorrt", "tensorflow", "openvino"})


@dataclass(frozen=True)
class Rule:
    """What the modules under a name may import besides the standard library.

    The first rule whose name a module has, or lies under, is its rule. `lazy` may only be imported inside
    a function.
    """

    module: str
    allowed: frozenset[str]
    lazy: frozenset[str] = frozenset()


def rule(module: str, *allowed: str, lazy: frozenset[str] = frozenset()) -> Rule:
    return Rule(module, frozenset(allowed), lazy)


RULES = (
    rule("conch.core", "numpy", "conch.core"),
    # It chooses whether a model runs here or in a worker.
    rule(
        "conch.backends.python",
        *("numpy", "conch.core", "conch.backends", "conch.workers"),
        lazy=frozenset({"conch.memory"}),
    ),
    rule("conch.backends", "numpy", "conch.core", "conch.backends", lazy=FRAMEWORKS | {"conch.memory"}),
    # Where tests of models put both planes together; only what loads models knows the control plane.
    rule(
        "conch.testing",
        *("numpy", "conch.core", "conch.backends", "conch.testing"),
        lazy=frozenset({"conch_control"}),
    ),
    rule("conch.caches.redis", "redis", "conch.core", "conch.caches"),
    rule("conch.caches", "conch.core", "conch.caches", lazy=frozenset({"blake3"})),
    rule("conch.frontends.grpc.adapter.library", "grpc", "grpc._cython"),
    rule("conch.frontends.grpc.adapter", "conch.core", "conch.frontends"),
    rule(
        "conch.frontends.http",
        "numpy",
        "orjson",
        "starlette",
        "httptools",
        "uvicorn",
        "uvloop",
        "conch.core",
        "conch.memory",
        "conch.observability",
        "conch.frontends",
    ),
    rule(
        "conch.frontends",
        *("numpy", "conch.core", "conch.memory", "conch.observability", "conch.protocol", "conch.frontends"),
        "google.protobuf",
    ),
    rule("conch.memory", "numpy", "conch.core", "conch.memory"),
    rule("conch.workers.environments", "conch.core", "conch.backends", "conch.workers.environments"),
    # What a worker imports, in whatever interpreter and environment: nothing that is not in these.
    rule(
        "conch.workers.host",
        "numpy",
        "conch.core",
        "conch.backends",
        "conch.workers",
        lazy=frozenset({"conch.memory"}),
    ),
    # Tensors on GPUs: the server knows of them, and so do workers whose server says that it uses some.
    rule("conch.workers.devices", "numpy", "conch.core", "conch.memory", "conch.workers"),
    rule("conch.workers.link", "conch.core", "conch.memory", "conch.workers"),
    rule("conch.workers.sending", "conch.core", "conch.backends", "conch.memory", "conch.workers"),
    rule("conch.workers", "numpy", "conch.core", "conch.backends", "conch.workers"),
    rule("conch.observability.metrics", "prometheus_client", "conch.core", "conch.observability.metrics"),
    rule("conch.observability", "conch.core", "conch.observability"),
    rule("conch.protocol", "conch.protocol", "google.protobuf"),
    rule("conch.cli.settings", "conch.cli.settings"),
    rule("conch.cli", "conch", "conch_control"),
    rule("conch.process.banner", "conch.core"),
    rule("conch.process", "conch", "conch_control"),
    rule("conch.server_options", "conch", "conch_control"),
    rule("conch.server", "conch", "conch_control"),
    rule("conch.api", "numpy", "google.protobuf", "conch", "conch_control"),
    rule("conch_control.planner.inotify", "watchdog", "conch_control"),
    rule(
        "conch_control.remote_api", "grpc", "conch.core", "conch.protocol", "conch_control", "google.protobuf"
    ),
    rule(
        "conch_control.repository.storage.s3",
        "conch_control.repository.storage",
        "aiobotocore",
        "aiohttp",
        "botocore",
        "s3fs",
    ),
    rule(
        "conch_control.repository.storage.gcs",
        "conch_control.repository.storage",
        "aiohttp",
        "gcsfs",
        "google.auth",
        "requests",
    ),
    rule("conch_control.repository.storage.azure", "conch_control.repository.storage", "azure"),
    rule("conch_control", "conch.core", "conch.protocol", "conch_control", "google.protobuf"),
    # pb_utils, the module that Triton's Python models import.
    rule("triton_python_backend_utils", "numpy", "conch.core", "conch.backends"),
    rule("c_python_backend_utils", "conch.backends"),
    rule("conch"),
)

WALL_CLOCK = frozenset({"time.time"})
SLEEPS = frozenset({"time.sleep"})
CALLS_ALLOWED: frozenset[tuple[str, str]] = frozenset()
"""(module, call) pairs that may stay."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def lies_under(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int, bool]]:
    """All imported names with their lines and whether they are imported inside a function."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                # `from conch import server` imports conch.server, `from time import sleep` imports time.
                yield f"{base}.{alias.name}", node.lineno, id(node) in inside


def calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Calls of the functions of `time`, under whatever name they were imported."""
    names = {"time": "time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            names |= {alias.asname or alias.name: f"time.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts = ast.unparse(node.func).split(".")
            yield ".".join([names.get(parts[0], parts[0]), *parts[1:]]), node.lineno


def violations(path: Path, root: Path) -> list[str]:
    """What a source file does that its place forbids."""
    module = module_name(path, root)
    tree = ast.parse(path.read_text(), str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    place = next((rule for rule in RULES if lies_under(module, rule.module)), None)
    if place is None:
        return [f"{module}: no rule says what it may import"]
    found: list[str] = []
    for name, line, lazily in imports(tree, package):
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        allowed = place.allowed | place.lazy if lazily else place.allowed
        if not any(lies_under(name, other) for other in allowed):
            found.append(f"{module}:{line} imports {name}")
    for name, line in calls(tree):
        if name in WALL_CLOCK | SLEEPS and (module, name) not in CALLS_ALLOWED:
            found.append(f"{module}:{line} calls {name}")
    return found


def sources() -> list[tuple[Path, Path]]:
    return [(path, root) for root in PACKAGES for path in sorted(root.rglob("*.py"))]


@pytest.mark.parametrize(
    ("path", "root"), [pytest.param(path, root, id=module_name(path, root)) for path, root in sources()]
)
def test_every_module_imports_only_what_its_place_allows(path: Path, root: Path) -> None:
    assert violations(path, root) == []


def test_the_adapter_is_imported_as_a_whole() -> None:
    """Nobody gets at grpcio through its modules."""
    adapter = "conch.frontends.grpc.adapter"
    parts = {path.stem for path, root in sources() if lies_under(module_name(path, root), adapter)}
    inner = {f"{adapter}.{part}" for part in parts}
    assert f"{adapter}.library" in inner
    for path, root in sources():
        if not lies_under(module_name(path, root), adapter):
            found = {name for name, _, _ in imports(ast.parse(path.read_text()), "")}
            assert not [name for name in found if any(lies_under(name, module) for module in inner)], path


def test_all_packages_are_read() -> None:
    names = {module_name(path, root) for path, root in sources()}
    assert {
        "conch.core.model_version",
        "conch.frontends.grpc.adapter",
        "conch.server",
        "conch_control.lifecycle.agent",
    } <= names


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("conch/core/bad.py", "import grpc", "conch.core.bad:1 imports grpc"),
        ("conch/core/bad.py", "def f():\n    import onnxruntime", "conch.core.bad:2 imports onnxruntime"),
        (
            "conch/core/bad.py",
            "from conch.frontends import grpc",
            "conch.core.bad:1 imports conch.frontends.grpc",
        ),
        ("conch/core/bad.py", "from conch import server", "conch.core.bad:1 imports conch.server"),
        ("conch/core/bad.py", "from ..frontends import x", "conch.core.bad:1 imports conch.frontends.x"),
        ("conch/core/bad.py", "from google.protobuf import x", "conch.core.bad:1 imports google.protobuf.x"),
        ("conch/core/bad.py", "from conch_control import x", "conch.core.bad:1 imports conch_control.x"),
        ("conch/core/bad.py", "import time\ntime.sleep(1)", "conch.core.bad:2 calls time.sleep"),
        ("conch/core/bad.py", "from time import time as t\nt()", "conch.core.bad:2 calls time.time"),
        ("conch/core/bad.py", "import time as t\nt.time()", "conch.core.bad:2 calls time.time"),
        ("conch/backends/bad.py", "import onnxruntime", "conch.backends.bad:1 imports onnxruntime"),
        ("conch/backends/bad.py", "import conch.frontends", "conch.backends.bad:1 imports conch.frontends"),
        ("conch/frontends/grpc/bad.py", "import grpc", "conch.frontends.grpc.bad:1 imports grpc"),
        (
            "conch/frontends/grpc/adapter/bad.py",
            "import grpc",
            "conch.frontends.grpc.adapter.bad:1 imports grpc",
        ),
        (
            "conch/frontends/http/bad.py",
            "from grpc._cython import cygrpc",
            "conch.frontends.http.bad:1 imports grpc._cython.cygrpc",
        ),
        ("conch/frontends/bad.py", "import conch.backends", "conch.frontends.bad:1 imports conch.backends"),
        ("conch/observability/bad.py", "import numpy", "conch.observability.bad:1 imports numpy"),
        ("conch_control/bad.py", "import conch.server", "conch_control.bad:1 imports conch.server"),
        ("conch_control/bad.py", "import conch.frontends", "conch_control.bad:1 imports conch.frontends"),
        (
            "conch/cli/settings/bad.py",
            "import conch_control",
            "conch.cli.settings.bad:1 imports conch_control",
        ),
        ("conch/somewhere_new.py", "import numpy", "conch.somewhere_new:1 imports numpy"),
        ("elsewhere.py", "", "elsewhere: no rule says what it may import"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert violations(path, tmp_path) == [expected]


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "conch" / "backends" / "good.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "import time\nimport numpy as np\nfrom conch.core.tensor import Tensor\nfrom . import other\n"
        "def load():\n    import onnxruntime\n    return onnxruntime, time.monotonic_ns()\n"
    )
    assert violations(path, tmp_path) == []
