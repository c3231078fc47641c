"""`conch new model`: writes a first Python model that serves and passes its own test."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

DONE, FAILED = 0, 1
"""Exit codes; argparse ends with 2 for a wrong command line."""

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
    given = parser.parse_args(arguments)
    if not _NAME.fullmatch(given.name):
        model.error(f"'{given.name}' can't be the name: a letter, then letters, digits and _, is expected")
    return _write(given.name, given.repository)


def _write(name: str, repository: Path) -> int:
    directory = repository / name
    test = directory / f"test_{name}.py"
    files = {directory / "config.pbtxt": _CONFIG, directory / "1" / "model.py": _MODEL, test: _TEST}
    try:
        directory.mkdir(parents=True)  # fails if the model exists
        for path, content in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(content.format(name=name))
    except OSError as error:
        print(f"conch new model: {directory} can't be written: {error.strerror}", file=sys.stderr)
        return FAILED
    print("\n".join(map(str, files)))
    print(f"test it:   pytest {test}\nserve it:  conch serve --model-repository={repository}")
    return DONE
