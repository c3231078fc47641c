"""Serves a `torch.nn.Module` class from a model's own file; runs as a Python model, mostly in a worker.

Rules are those of Triton's PyTorch backend with ``runtime: "model.py"``: the file defines the class, the
weights lie beside it under the same stem, inputs are positional in the config's order. Imports nothing of
conch, as the model may have an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

_CLASS = "CONCH_TORCH_CLASS"
_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_FILES = ("model.py", "model.pt")


class TritonPythonModel:
    """One instance: the module on its device."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads class and weights, moves them to the device, compiles them if the config asks for it."""
        config = json.loads(args["model_config"])
        parameters = {
            key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()
        }
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._outputs = [tensor["name"] for tensor in config["output"]]
        self._batches = int(config.get("max_batch_size", 0)) > 0
        _set_threads(parameters)
        folder = Path(args["model_repository"]) / args["model_version"]
        source = _source(folder, config.get("default_model_filename", ""))
        module = _import(source, config["name"])
        model = _find_class(module, parameters.get(_CLASS, ""), source)()
        weights = _weights(source)
        if weights is not None:
            model.load_state_dict(weights)
        self._device = _device(args, model)
        model = model.to(self._device) if args["model_instance_kind"] != "MODEL" else model
        model.eval()
        options = _compile_options(parameters)
        # Triton always compiles; here only on request, as compiling takes minutes and needs a compiler.
        self._model = model if options is None else torch.compile(model, **options)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Runs the requests as one batch if the model batches."""
        if not self._batches:
            return [self._run([request])[0] for request in requests]
        return self._run(requests)

    def _run(self, requests: Sequence[Any]) -> list[Any]:
        try:
            inputs = [self._joined(requests, name) for name in self._inputs]
            with torch.inference_mode():
                results = self._model(*inputs)
        except Exception as error:  # of the user's class
            failed = pb_utils.TritonError(f"PyTorch execute failure: {error}")
            return [pb_utils.InferenceResponse(error=failed) for _ in requests]
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        if len(results) < len(self._outputs) or not all(isinstance(each, torch.Tensor) for each in results):
            text = f"the model returned {len(results)} values, expected {len(self._outputs)} tensors"
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text)) for _ in requests]
        results = [value.cpu().contiguous() for value in results]
        if not self._batches:
            return [self._response(results)]
        sizes = [_input(request, self._inputs[0]).shape()[0] for request in requests]
        parts = [value.split(sizes) for value in results]
        return [self._response(values) for values in zip(*parts, strict=True)]

    def _joined(self, requests: Sequence[Any], name: str) -> Any:
        tensors = [torch.from_dlpack(_input(request, name).to_dlpack()) for request in requests]
        return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(self._device)

    def _response(self, values: Sequence[Any]) -> Any:
        named = zip(self._outputs, values, strict=False)
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(name, value) for name, value in named])


def _input(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name)


def _set_threads(parameters: dict[str, str]) -> None:
    for key, change in (
        ("NUM_THREADS", torch.set_num_threads),
        ("NUM_INTEROP_THREADS", torch.set_num_interop_threads),
    ):
        text = parameters.get(key, "1")
        if not text.isdecimal() or not int(text):
            raise ValueError(f"parameter '{key}' must be a positive whole number, got '{text}'")
        try:
            change(int(text))
        except RuntimeError as error:  # inter-op work of another model in the same process has begun
            pb_utils.Logger.log_warn(f"parameter '{key}' has no effect: {error}")


def _source(folder: Path, name: str) -> Path:
    for each in (name, *_FILES):
        if each.endswith(".py") and (folder / each).is_file():
            return folder / each
    raise FileNotFoundError(f"No model found in {folder}/{[name, *_FILES] if name else list(_FILES)}")


def _import(source: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"torch_class_of_{name}", source)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    # Compiled code and pickled classes look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _find_class(module: ModuleType, name: str, source: Path) -> Any:
    """The class named by the config, else the first one that the file itself defines."""
    found = [
        value
        for _, value in sorted(vars(module).items())
        if isinstance(value, type)
        and issubclass(value, torch.nn.Module)
        and value.__module__ == module.__name__
    ]
    if name:
        found = [value for value in found if value.__name__ == name]
    if not found:
        wanted = f" named '{name}' by parameter '{_CLASS}'" if name else ""
        raise ValueError(f"Cannot find a subclass of torch.nn.Module{wanted} in '{source}'")
    if len(found) > 1:
        pb_utils.Logger.log_warn(
            f"'{source}' defines {len(found)} modules; '{found[0].__name__}' is served, parameter '{_CLASS}' "
            f"chooses another"
        )
    return found[0]


def _weights(source: Path) -> Any:
    """The state dict beside the file; None without one. Loads no Python objects."""
    tensors, saved = source.with_suffix(".safetensors"), source.with_suffix(".pt")
    if tensors.is_file():
        from safetensors.torch import load_file

        return load_file(tensors)
    if saved.is_file():
        return torch.load(saved, map_location="cpu", weights_only=True)
    return None


def _device(args: dict[str, str], model: Any) -> Any:
    kind = args["model_instance_kind"]
    if kind == "GPU":
        return torch.device("cuda", int(args["model_instance_device_id"]))
    if kind == "CPU":
        return torch.device("cpu")
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError("Cannot determine model device")
    return first.device


def _compile_options(parameters: dict[str, str]) -> dict[str, Any] | None:
    text = parameters.get(_COMPILE)
    if text is None:
        return None
    try:
        options = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"parameter '{_COMPILE}' must be a JSON object: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"parameter '{_COMPILE}' must be a JSON object, got '{text}'")
    if "model" in options:
        raise ValueError("'model' is not an optional parameter for 'torch.compile'")
    # PyTorch's own default is a temporary folder, which containers lose.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "conch" / "torchinductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return options
