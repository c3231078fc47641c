"""The files of a new backend package: `conch new backend`."""

from __future__ import annotations

FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "conch-{name}"
version = "0.1.0"
description = "The backend '{name}' for conch"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["conch", "numpy"]

[project.optional-dependencies]
test = ["pytest"]

# conch finds the backend by this name, and imports it for the first model that needs it.
[project.entry-points."conch.backends"]
{name} = "conch_{name}:{type}Backend"

[tool.hatch.build.targets.wheel]
packages = ["src/conch_{name}"]
""",
    "README.md": """\
# The backend `{name}` for conch

Serves models with `backend: "{name}"`. As a start, a model is a file `factor.txt` with a number by which
its input is multiplied.

```
pip install -e '.[test]'
pytest
```

A model repository for it:

```
models/
  times3/
    config.pbtxt     backend: "{name}"
    1/factor.txt     3
```

Serve it with `conch serve --model-repository=models`.
""",
    "src/conch_{name}/__init__.py": '''\
"""The backend '{name}': multiplies INPUT by the number in a model's file."""

from conch.backends.arrays import ArrayBackend
from conch.core.errors import InvalidArgumentError

_TENSORS = {{
    "input": [{{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [-1]}}],
    "output": [{{"name": "OUTPUT", "data_type": "TYPE_FP32", "dims": [-1]}}],
}}


class {type}Backend(ArrayBackend):
    """Loads models; one object for all of them."""

    default_model_file = "factor.txt"
    parameters = ("OFFSET",)  # conch check warns of others
    passes_parameters = False

    @property
    def uses_gpus(self):
        """True if instance groups without a kind go to the GPUs of the machine."""
        return False

    def complete_config(self, config, version_directory, options):
        """Fills in what the config leaves out, so that users need not write it."""
        config["max_batch_size"] = config.get("max_batch_size") or 8
        for key, tensors in _TENSORS.items():
            if not config.get(key):
                config[key] = tensors
        return config

    def check(self, spec):
        """Finds problems without a device; `conch check` calls it."""
        _read(spec)

    def open(self, spec, placement):
        """Makes the function of one instance; a method `close` of it, if any, is called at the end."""
        factor, offset = _read(spec)

        def scale(inputs, outputs):
            # One array per input, with the rows of all requests of the batch.
            array = inputs["INPUT"]
            return {{"OUTPUT": (array * factor + offset).astype(array.dtype)}}

        return scale


def _read(spec):
    path = spec.version_directory / spec.model_file
    texts = {{str(path): path.read_text(), "parameter 'OFFSET'": spec.parameters.get("OFFSET", "0")}}
    numbers = []
    for source, text in texts.items():
        try:
            numbers.append(float(text))
        except ValueError:
            raise InvalidArgumentError(f"{{source}} must be a number, got '{{text.strip()}}'") from None
    return numbers
''',
    "tests/test_{name}.py": '''\
"""Tests of the backend '{name}'; they need no server."""

import conch.testing
import numpy as np
import pytest


@pytest.fixture
def model(tmp_path):
    (tmp_path / "times3" / "1").mkdir(parents=True)
    (tmp_path / "times3" / "config.pbtxt").write_text('backend: "{name}"')
    (tmp_path / "times3" / "1" / "factor.txt").write_text("3")
    return tmp_path / "times3"


def test_requests_that_share_a_batch(model):
    inputs = [{{"INPUT": np.full((rows, 2), rows, np.float32)}} for rows in (1, 2, 3)]
    with conch.testing.load(model) as loaded:
        outputs = [each["OUTPUT"] for each in loaded.run_all(inputs)]
    for given, output in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(output, given["INPUT"] * 3)


def test_parameters(model):
    config = {{"parameters": {{"OFFSET": {{"string_value": "1"}}}}}}
    outputs = conch.testing.run(model, {{"INPUT": np.ones((1, 1), np.float32)}}, config=config)
    assert outputs["OUTPUT"].tolist() == [[4]]


def test_a_file_that_holds_no_number(model):
    (model / "1" / "factor.txt").write_text("three")
    with pytest.raises(conch.testing.ModelError, match="must be a number, got 'three'"):
        conch.testing.load(model)
''',
}
"""Content by path; ``{name}`` is the backend's name, ``{type}`` the beginning of its class's name."""
