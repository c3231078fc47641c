"""The commands of docs/protocol.md, with real curl, against the server it names and against Triton."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support import curls
from tests.support.peers import NEEDS_TRITON, triton_serving
from tests.support.servers import EXAMPLES, ROOT, WAIT_S, copy_example, free_port, serving_process

from conch.protocol import inference_pb2

PAGE = ROOT / "docs" / "protocol.md"
SECTIONS = curls.examples(PAGE, 3)
OWN_SECTIONS = ("Labels", "Rollouts", "OpenAPI", "Load reports")
"""Sections that Triton does not have, or has for models of TensorRT-LLM only."""
METHODS = {"get", "post", "put", "delete"}
PYTHON_MODELS = ("add_sub_python", "strings", "word_chain")
"""Those of the examples that the Triton of the tests can serve, and the page's commands name."""


def free_ports() -> dict[str, str]:
    """Addresses for those of the page."""
    return {documented: f"127.0.0.1:{free_port()}" for documented in ("localhost:8000", "localhost:8002")}


def flags(addresses: Mapping[str, str]) -> list[str]:
    """The page's flags, and those that have a server listen there."""
    http, metrics = (address.rpartition(":")[2] for address in addresses.values())
    return [
        "--model-control-mode=explicit",
        "--load-model=*",
        *("--allow-http=true", f"--http-port={http}", "--allow-metrics=true", f"--metrics-port={metrics}"),
    ]


@pytest.fixture(scope="module")
def addresses() -> Iterator[Mapping[str, str]]:
    """Those of a server."""
    with serving_process(EXAMPLES, flags=flags(ports := free_ports())):
        yield ports


@pytest.mark.parametrize("section", SECTIONS)
def test_commands_are_answered_as_the_page_says(
    addresses: Mapping[str, str], tmp_path: Path, section: str
) -> None:
    for example in SECTIONS[section]:
        curls.run(example, addresses, tmp_path)


@pytest.mark.peer
@NEEDS_TRITON[1]
def test_triton_answers_alike(tmp_path: Path) -> None:
    """Triton answers the examples of its protocol as the page says."""
    repository, directory = tmp_path / "models", tmp_path / "work"
    repository.mkdir()
    directory.mkdir()
    for model in PYTHON_MODELS:
        copy_example(repository, model)
    with triton_serving(repository, *flags(ports := free_ports())):
        for section, examples in SECTIONS.items():
            for example in examples:
                if section not in OWN_SECTIONS and "_onnx" not in example.command:
                    # Its bodies of health are empty.
                    alike = replace(example, output=curls.REST) if section == "Health" else example
                    curls.run(alike, ports, directory)


def test_all_routes_are_in_the_table_and_have_an_example(addresses: Mapping[str, str]) -> None:
    with urllib.request.urlopen(
        f"http://{addresses['localhost:8000']}/openapi.json", timeout=WAIT_S
    ) as answer:
        paths = json.load(answer)["paths"]
    described = {re.sub(r"\{\w+\}", "{}", path): METHODS & set(said) for path, said in paths.items()}
    assert listed_routes() == described.keys() | {"/openapi.json"}
    used = [(call.method, call.path) for examples in SECTIONS.values() for call in calls(examples)]
    for path, methods in described.items():
        # The description of a model holds for a version of it, and the other way round.
        pattern = path.replace("/versions/{}", "").replace("{}", "[^/]+")
        for method in methods:
            assert any(how == method and re.fullmatch(pattern, where) for how, where in used), (method, path)


def listed_routes() -> set[str]:
    """The REST routes of the page's table, placeholders as braces, what is optional taken apart."""
    (table,) = re.findall(r"^\| route .*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = set()
    for route in re.findall(r"^\| \[?`([^`…]+)`", table, re.MULTILINE):
        braced = re.sub(r"/[A-Z]\b", "/{}", route)
        found |= {re.sub(r"\[.*?\]", "", braced), re.sub(r"[][]", "", braced)}
    return found - {"/metrics"}


@dataclass(frozen=True)
class Call:
    method: str
    path: str


def calls(examples: Sequence[curls.Example]) -> Iterator[Call]:
    """The calls of the REST port that commands make."""
    for example in examples:
        for path in re.findall(r"localhost:8000(/[^\s'\"]*)", example.command):
            method = re.search(r"--request ([A-Z]+)", example.command)
            default = "post" if "--data" in example.command else "get"
            yield Call(default if method is None else method[1].lower(), re.sub("/versions/[0-9]+", "", path))


def test_all_rpcs_are_in_the_table() -> None:
    (table,) = re.findall(r"^\| RPC .*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    service = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert sorted(listed) == sorted(method.name for method in service.methods)
