"""`conch new`: writes a first Python model, or a backend in Python or C, that passes its own tests."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from conch.backends import backend_names
from conch.cli.examples import examples_directory
from conch.settings.option import FlagError
from conch_tools.backend_skeleton import FILES

DONE, FAILED = 0, 1
"""Exit codes; argparse ends with 2 for a wrong command line."""

_BACKEND_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
dynamic_batching {{ }}
"""
_MODEL = '''\
"""The model '{name}': doubles what it is sent."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Runs once for each instance: load weights here."""
        self.factor = 2

    def execute(self, requests):
        """Gives one response for each request."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        # An array with the batch dimension first.
        values = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", values * self.factor)])
'''
_TEST = '''\
"""Tests of the model '{name}'; run them with pytest, no server is needed."""

from pathlib import Path

import conch.testing
import numpy as np


def test_doubles():
    outputs = conch.testing.run(Path(__file__).parent, {{"INPUT": np.array([[1.0, 2.5]], np.float32)}})
    assert outputs["OUTPUT"].tolist() == [[2.0, 5.0]]
'''
_CHAT_CONFIG = """\
name: "{name}"
backend: "python"
"""
_CHAT_MODEL = '''\
"""The model '{name}': repeats the last message, word by word."""

from conch_llm import Delta


class TritonPythonModel:
    def initialize(self, args):
        """Runs once for each instance: load weights here."""

    async def chat(self, request):
        """Yields the answer to a conversation; what waits is awaited, so that others go on."""
        for word in request.messages[-1]["content"].split():
            yield Delta(word + " ", tokens=1)
'''
_CHAT_TEST = '''\
"""Tests of the model '{name}'; run them with pytest, no server is needed."""

from pathlib import Path

import conch.testing


def test_repeats():
    (answer,) = conch.testing.run(Path(__file__).parent, {{"text_input": ["good morning"]}})
    assert answer["text_output"].tolist() == [b"good morning "]
    assert answer["num_output_tokens"].tolist() == [2]
'''
_C_NAME = "standardize"
_C_FILES = (
    *("standardize.c", "Makefile", "README.md", "test_standardize.py"),
    *("models/standardize/config.pbtxt", "models/standardize/1/README"),
)
"""Files of ``examples/native``, whose backend is `_C_NAME`."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="conch new", allow_abbrev=False)
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    text = "Writes a Python model that serves and passes its own test, to begin with."
    model = kinds.add_parser("model", help=text, description=text, allow_abbrev=False)
    model.add_argument("name", help="the model's name: a letter, then letters, digits and _")
    model.add_argument(
        "--repository",
        type=Path,
        default=Path("models"),
        metavar="DIRECTORY",
        help="the model repository to write it to; made if there is none (default: models)",
    )
    model.add_argument("--chat", action="store_true", help="a model that chats, for OpenAI's API")
    model.set_defaults(kind="model")
    text = "Writes a backend that passes its own tests, to begin with: a Python package, or a library in C."
    backend = kinds.add_parser("backend", help=text, description=text, allow_abbrev=False)
    backend.add_argument("name", help="the backend's name: a small letter, then small letters, digits and _")
    backend.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIRECTORY",
        help="where the directory conch-NAME, or with --c NAME_backend, is made (default: the current one)",
    )
    backend.add_argument(
        "--c", action="store_true", help="a library in C, written against Triton's interface"
    )
    backend.set_defaults(kind="backend")
    given = parser.parse_args(arguments)
    if given.kind == "model":
        if not _NAME.fullmatch(given.name):
            model.error(
                f"'{given.name}' can't be the name: a letter, then letters, digits and _, is expected"
            )
        return _write_model(given.name, given.repository, given.chat)
    if not _BACKEND_NAME.fullmatch(given.name):
        backend.error(
            f"'{given.name}' can't be the name: a small letter, then small letters, digits and _, is expected"
        )
    if given.name in backend_names():
        backend.error(f"there is a backend '{given.name}' already; choose another name")
    if given.c:
        return _write_c_backend(given.name, given.directory / f"{given.name}_backend")
    return _write_backend(given.name, given.directory / f"conch-{given.name}")


def _write_model(name: str, repository: Path, chat: bool) -> int:
    directory = repository / name
    test = directory / f"test_{name}.py"
    texts = (_CHAT_CONFIG, _CHAT_MODEL, _CHAT_TEST) if chat else (_CONFIG, _MODEL, _TEST)
    paths = ("config.pbtxt", "1/model.py", test.name)
    files = {path: text.format(name=name) for path, text in zip(paths, texts, strict=True)}
    if not _write("model", directory, files):
        return FAILED
    print(f"test it:   pytest {test}\nserve it:  conch serve --model-repository={repository}")
    return DONE


def _write_backend(name: str, directory: Path) -> int:
    words = {"name": name, "type": "".join(part.capitalize() for part in name.split("_"))}
    files = {path.format(**words): content.format(**words) for path, content in FILES.items()}
    if not _write("backend", directory, files):
        return FAILED
    print(f"test it:   cd {directory} && pip install -e '.[test]' && pytest")
    return DONE


def _write_c_backend(name: str, directory: Path) -> int:
    """Writes the example of a backend in C under another name."""
    try:
        example = examples_directory() / "native"
        files = {path: (example / path).read_text() for path in _C_FILES}
    except (FlagError, OSError) as error:
        print(f"conch new backend: the example of a backend in C can't be read: {error}", file=sys.stderr)
        return FAILED
    renamed = {path.replace(_C_NAME, name): text.replace(_C_NAME, name) for path, text in files.items()}
    if not _write("backend", directory, renamed):
        return FAILED
    models = directory / "models"
    print(
        f"build it:  make -C {directory}    # the package conch-native has its headers\n"
        f"test it:   pytest {directory}\n"
        f"serve it:  conch serve --model-repository={models}"
    )
    return DONE


def _write(kind: str, directory: Path, files: Mapping[str, str]) -> bool:
    """Writes files to a new directory and prints their paths; False if it can't be."""
    try:
        directory.mkdir(parents=True)  # fails if it exists
        for path, content in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(content)
    except OSError as error:
        print(f"conch new {kind}: {directory} can't be written: {error.strerror}", file=sys.stderr)
        return False
    print("\n".join(str(directory / path) for path in files))
    return True
