"""Models whose backend is a library compiled for Triton: `conch check` reads it, and runs nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.libraries import Libraries

from conch.cli import main

IO = """input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""
ENDS = "__attribute__((constructor)) void end(void) { __builtin_trap(); }"
"""Ends a process that opens the library."""


def findings(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, list[tuple[str, str]]]:
    """Severity and message of each finding by its file, or its field if the file is the config."""
    main(["check", "--json", *map(str, arguments)])
    (model,) = json.loads(capsys.readouterr().out)["models"]
    found: dict[str, list[tuple[str, str]]] = {}
    for each in model["findings"]:
        place = each["path"] if each["file"].endswith("config.pbtxt") else each["file"]
        found.setdefault(place, []).append((each["severity"], each["message"]))
    return found


def model(libraries: Libraries, config: str) -> Path:
    """A repository whose model `m` has a backend of its own in version 2, and in the model's directory."""
    gone = libraries.build("libgone.so", "int gone(void) { return 0; }")
    new = libraries.backend(
        "repository/m/2/libtriton_mine.so",
        f"{ENDS} int gone(void); int f(void) {{ return gone(); }}",
        str(gone),
    )
    gone.unlink()
    source = f"{ENDS} int TRITONBACKEND_GetBackendAttribute(void) {{ return 0; }}"
    libraries.backend("repository/m/libtriton_mine.so", source)
    repository = new.parents[2]
    (repository / "m" / "1").mkdir()
    (repository / "m" / "config.pbtxt").write_text(f"{config}\n{IO}version_policy {{ all {{}} }}")
    return repository


def test_each_version_has_the_findings_of_its_own_library(
    libraries: Libraries, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = model(libraries, 'backend: "mine"')
    found = findings(capsys, repository)
    (error,) = found[f"{repository}/m/2/libtriton_mine.so"]
    assert error[0] == "error"
    assert error[1].startswith("libgone.so is missing, which it needs; searched: ")
    ((severity, text),) = found[f"{repository}/m/libtriton_mine.so"]
    assert severity == "note"
    assert "instance groups that it prefers" in text


def test_custom_batching_is_an_error(libraries: Libraries, capsys: pytest.CaptureFixture[str]) -> None:
    text = "custom batching by a library is not supported: use the settings of dynamic_batching"
    repository = model(libraries, 'backend: "mine"\ninstance_group { kind: KIND_CPU }')
    (strategy := repository / "m" / "1" / "batchstrategy.so").touch()
    assert f"{text}; '{strategy}' is one" in str(findings(capsys, repository))
    strategy.unlink()
    parameter = 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "s.so" } }'
    with (repository / "m" / "config.pbtxt").open("a") as config:
        config.write(parameter)
    assert f"parameter 'TRITON_BATCH_STRATEGY_PATH': {text}" in str(findings(capsys, repository))


def test_only_a_runtime_puts_a_library_before_a_backend_of_conch(
    libraries: Libraries, capsys: pytest.CaptureFixture[str]
) -> None:
    path = libraries.build("backends/python/libtriton_python.so", ENDS)
    repository = libraries.directory / "repository"
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    )
    config = repository / "m" / "config.pbtxt"
    config.write_text(f'backend: "python"\n{IO}')
    directory = ("--backend-directory", path.parents[1])
    assert findings(capsys, repository, *directory) == {}
    config.write_text(f'backend: "python"\n{IO}runtime: "libtriton_python.so"')
    (error,) = findings(capsys, repository, *directory)[str(path)]
    assert "unable to find required entrypoint" in error[1]
