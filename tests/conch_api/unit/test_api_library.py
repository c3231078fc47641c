"""`import conch`, and flags by keyword."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conch
from conch.cli.settings.settings_reader import read_flags, read_keywords
from conch.server_settings import SETTINGS
from conch.settings.option import FlagError


@pytest.mark.process
def test_the_import_alone_imports_nothing_else() -> None:
    heavy = ("conch.", "numpy", "grpc", "conch_")
    script = f"import sys, conch; print([m for m in sys.modules if m.startswith({heavy})])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_all_names_are_there_and_known_to_type_checkers() -> None:
    stub = ast.parse(Path(conch.__file__).with_suffix(".pyi").read_text())
    named = {
        (node.module, alias.name)
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"__version__", *(name for _, name in named)} == set(conch.__all__)  # type: ignore[attr-defined]
    for module, name in named:
        assert getattr(conch, name) is getattr(importlib.import_module(str(module)), name)
    for name in conch.__all__:  # type: ignore[attr-defined]
        assert getattr(conch, name) is not None
        assert name in dir(conch)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'conch' has no attribute 'Srever'"):
        _ = conch.Srever  # type: ignore[attr-defined]


PORTS = tuple(flag.name for flag in SETTINGS if re.fullmatch(r"(?!reuse-).*-port", flag.name))
ROUTES = tuple(flag.name for flag in SETTINGS if flag.name.endswith("-route"))
# Where 1 is refused.
VALUES = dict.fromkeys(ROUTES, "/1")
VALUES |= {"grpc-max-metadata-bytes": "2048", "sagemaker-safe-port-range": "1-65535"}
VALUES["model-repository"] = "mlflow://1"  # without one, some have no effect
VALUES |= {"openai-restricted-api": "inference:a=b", "resident-gpu-memory": "0:1"}


def test_every_flag_has_a_keyword_that_says_the_same() -> None:
    values: dict[str, Any] = {}
    arguments = []
    for number, flag in enumerate(SETTINGS):
        if flag.name == "config-file" or flag.choices == ():
            continue
        text = (
            flag.choices[-1]
            if flag.choices
            else str(number)
            if flag.name in PORTS
            else VALUES.get(flag.name, "1")
        )
        values[flag.key] = [text] if flag.repeatable else text
        arguments.append(f"--{flag.name}={text}")
    assert read_keywords(values).values == read_flags(arguments, {}).values


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"grpc_prot": 1}, "there is no option 'grpc_prot'; did you mean 'grpc_port'?"),
        ({"grpc-port": 1}, "there is no option 'grpc-port'; did you mean 'grpc_port'?"),
        ({"zzz": 1}, "^there is no option 'zzz'$"),
        ({"grpc_port": [1, 2]}, "grpc_port: takes one value, not 2 of them"),
        ({"grpc_port": "x"}, "grpc_port: 'x' is not a whole number"),
        ({"grpc_port": 70000}, "--grpc-port: must be from 0 to 65535, got 70000"),
        ({"model_control_mode": "x"}, "model_control_mode: must be one of none, explicit"),
        ({"exit_on_error": "maybe"}, "exit_on_error: invalid value for bool option"),
    ],
)
def test_wrong_keywords_are_named(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(FlagError, match=text):
        read_keywords(keywords)


def test_keywords_take_python_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONCH_ID", "from the environment")
    file = tmp_path / "conch.toml"
    file.write_text('grpc-port = 1\nhttp-port = 2\nid = "file"\n')
    flags = read_keywords({"grpc_port": 5, "exit_on_error": False, "id": None, "config_file": file})
    assert (flags["grpc-port"], flags["http-port"], flags["exit-on-error"], flags["id"]) == (
        5,
        2,
        False,
        "file",
    )
    assert read_keywords({"load_model": "a"})["load-model"] == ["a"]
    assert read_keywords({"load_model": ("a", "b")})["load-model"] == ["a", "b"]
    assert read_keywords({})["id"] == "triton"


@pytest.mark.parametrize("name", ["log_verbose", "log_file", "log_json"])
def test_logging_belongs_to_the_program(name: str) -> None:
    keywords: dict[str, Any] = {name: "1"}
    with pytest.raises(FlagError, match=f"{name}: logging belongs to the program"):
        conch.Server(**keywords)


def test_the_command_line_says_what_a_server_refuses() -> None:
    with pytest.raises(FlagError, match="requires setting '--model-control-mode=explicit'"):
        conch.Server(load_model="a")
