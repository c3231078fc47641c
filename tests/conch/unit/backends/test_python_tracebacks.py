"""Exceptions of models in the log: Python's own traceback, without the server's frames."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs

from conch.core.errors import InternalError
from conch.core.model_version import Model
from conch.observability.logging.log_handler import TextFormatter
from conch.workers.python_backend import PythonBackend

HELPER = """
def broken(value):
    return 1 / value
"""

MODEL = """
import helper

class TritonPythonModel:
    KIND execute(self, requests):
        try:
            helper.broken(0)
        except ZeroDivisionError as error:
            raise ValueError("no answer") from error
EXTRA
"""


def load(harness: Harness, source: str) -> Model:
    harness.directory("m", {"1/model.py": source, "1/helper.py": HELPER})
    spec = harness.spec(inputs=tensor_specs(A=("FP32", (2,))), outputs=tensor_specs(B=("FP32", (2,))))
    return harness.load(PythonBackend(), spec)


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of errors as they are in the log, without the indentation of tracebacks."""
    formatter = TextFormatter(iso=False, escape=True)
    texts = [formatter.format(record) for record in caplog.records if record.levelno >= logging.ERROR]
    return [text.replace("\n    ", "\n") for text in texts]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("def", ""), ("async def", ""), ("def", "        yield"), ("async def", "        yield")],
)
def test_failed_execution(harness: Harness, caplog: pytest.LogCaptureFixture, kind: str, extra: str) -> None:
    model = load(harness, MODEL.replace("KIND", kind).replace("EXTRA", extra))
    told = harness.infer(model, {"A": rows(1)}).error
    (text,) = shown(caplog)
    directory = harness.root / "m/1"
    marks = "\n    ~~~~~~~~~~~~~^^^" if sys.version_info >= (3, 13) else ""
    expected = f'''Traceback (most recent call last):
  File "{directory}/model.py", line 7, in execute
    helper.broken(0){marks}
  File "{directory}/helper.py", line 3, in broken
    return 1 / value
           ~~^~~~~~~
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "{directory}/model.py", line 9, in execute
    raise ValueError("no answer") from error
ValueError: no answer'''
    head, _, traceback = text.partition("\n")
    assert head.endswith(
        "\"Failed to process the request(s) for model 'm_0_0', message: ValueError: no answer\""
    )
    assert traceback == expected
    # Clients get what Triton tells them.
    assert told == (
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: no answer\n\nAt:\n"
        f"  {directory}/model.py(9): execute\n"
    )


def test_our_own_checks_have_no_traceback(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    model = load(harness, "class TritonPythonModel:\n    def execute(self, requests):\n        return 5\n")
    harness.infer(model, {"A": rows(1)}).wait()
    (text,) = shown(caplog)
    assert "Expected a list in the execute return, found type" in text
    assert "File" not in text


def test_failed_initialize(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    initialize = "    def initialize(self, args):\n        helper.broken(0)"
    source = MODEL.replace("KIND", "def").replace("EXTRA", initialize)
    with pytest.raises(InternalError):
        load(harness, source)
    (text,) = shown(caplog)
    lines = text.splitlines()
    assert lines[0].endswith("\"initialize of model 'm_0_0' failed\"")
    assert lines[2] == f'  File "{harness.root}/m/1/model.py", line 11, in initialize'
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_syntax_error(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InternalError):
        load(harness, "import helper\n\ndef broken(:\n    pass\n")
    (text,) = shown(caplog)
    assert text.splitlines()[1:] == [
        f'  File "{Path(harness.root)}/m/1/model.py", line 3',
        "    def broken(:",
        "               ^",
        "SyntaxError: invalid syntax",
    ]


def test_error_in_a_module_that_is_imported(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    harness.directory("m", {"1/late.py": "import helper\nhelper.broken(0)\n"})
    with pytest.raises(InternalError):
        load(harness, "import late\n")
    (text,) = shown(caplog)
    files = [line.split('"')[1].rpartition("/")[2] for line in text.splitlines() if line.startswith("  File")]
    assert files == ["model.py", "late.py", "helper.py"]
