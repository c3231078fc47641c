"""Starts vLLM's engine from the files of a version directory.

vLLM is a moving target: `VERSIONS` is what was tested, functions are called with those of their arguments
that they have (`call`), and attributes that only some versions have are looked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from .vllm_files import ENGINE_FILE, MISSING, ModelFiles

VERSIONS = ((0, 31), (0, 33))
"""First and last minor version of vLLM that was tested."""


class SetupError(Exception):
    """The engine can't be started; the text is for the operator."""


class AbsentError(Exception):
    """This version of vLLM lacks a function."""


def import_vllm() -> Any:
    """The module ``vllm``.

    Raises:
        SetupError: It is not installed.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise SetupError(MISSING) from None


def is_tested(version: str) -> bool:
    """True if a version of vLLM is in the tested range."""
    match = re.match(r"(\d+)\.(\d+)", version)
    first, last = VERSIONS
    return match is not None and first <= (int(match[1]), int(match[2])) <= last


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a function of vLLM with those of the named arguments that this version of it has."""
    known = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return function(*arguments, **named)
    return function(*arguments, **{name: value for name, value in named.items() if name in known})


def find(*places: str) -> Any:
    """The first attribute that is there of places such as ``vllm.inputs:TokensPrompt``; None without one."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


class Engine:
    """A running engine and what was set for it; made in the event loop that it is used in.

    Attributes:
        name: Name of the model.
        client: vLLM's ``AsyncLLM``.
        arguments: vLLM's ``AsyncEngineArgs``.
        files: Contents of the version directory.
        served_names: Names that requests may have in ``model``.
        tasks: Tasks of the model, such as ``generate`` or ``embed``.
        defaults: Sampling parameters of the model's ``generation_config.json``.
        adapters: LoRA requests by name; None without LoRA.
    """

    def __init__(self, name: str, files: ModelFiles, aliases: tuple[str, ...]) -> None:
        self.name = name
        self.files = files
        self.served_names = tuple(dict.fromkeys((name, *files.served_names, *aliases)))
        self.arguments = _engine_arguments(files, self.served_names)
        self.client: Any = None
        self.tasks: tuple[str, ...] = ()
        self.defaults: Mapping[str, Any] = {}
        self.adapters: Mapping[str, Any] | None = None

    async def start(self) -> None:
        """Starts the engine's processes and loads the model."""
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = self.arguments
        usage = find("vllm.usage.usage_lib:UsageContext")
        usage = None if usage is None else usage.OPENAI_API_SERVER
        config = call(arguments.create_engine_config, usage_context=usage)
        self.client = call(
            AsyncLLM.from_vllm_config,
            vllm_config=config,
            usage_context=usage,
            enable_log_requests=getattr(arguments, "enable_log_requests", False),
            aggregate_engine_logging=getattr(arguments, "aggregate_engine_logging", False),
            disable_log_stats=arguments.disable_log_stats,
        )
        self.tasks = tuple(await self.client.get_supported_tasks())
        self.defaults = dict(self.client.model_config.get_diff_sampling_param() or {})
        if self.files.adapters is not None:
            from vllm.lora.request import LoRARequest

            # vLLM's own layer numbers the same adapters in the same order.
            self.adapters = {
                name: LoRARequest(name, number, path)
                for number, (name, path) in enumerate(self.files.adapters.items(), 1)
            }

    @property
    def dead(self) -> bool:
        """True if the engine has died, from which it never recovers."""
        return bool(self.client.errored)

    def stop(self) -> None:
        """Ends the engine's processes."""
        self.client.shutdown()


def _engine_arguments(files: ModelFiles, served_names: tuple[str, ...]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs) if field.init}
    given = dict(files.engine)
    # Triton's examples have the name that vLLM has given up.
    if "disable_log_requests" in given and "disable_log_requests" not in known:
        given["enable_log_requests"] = not given.pop("disable_log_requests")
    if unknown := sorted(given.keys() - known):
        close = difflib.get_close_matches(unknown[0], known)
        hint = f"; close are: {', '.join(close)}" if close else ""
        raise SetupError(f"'{ENGINE_FILE}' has unknown engine args: {', '.join(unknown)}{hint}")
    given.update({key: value for key, value in files.openai.items() if key in known})
    return AsyncEngineArgs(**given, served_model_name=list(served_names))


def choose_devices(
    kind: str, device: int, gpus: str, engine: Mapping[str, Any], group: tuple[int, ...]
) -> None:
    """Sets the GPUs that vLLM sees; before it is imported.

    Args:
        kind: Kind of the instance.
        device: The instance's GPU.
        gpus: The parameter ``GPU_DEVICE_IDS``.
        engine: Arguments of the engine.
        group: GPUs of an instance group of kind MODEL.

    Raises:
        SetupError: They contradict each other.
    """
    size = int(engine.get("tensor_parallel_size", 1)) * int(engine.get("pipeline_parallel_size", 1))
    chosen = group
    if kind == "GPU":
        if size > 1:
            raise SetupError(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's "
                "config.pbtxt for multi-GPU models"
            )
        chosen = (device,)
    elif gpus:
        parts = [part.strip() for part in gpus.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts) or len({*parts}) < len(parts):
            raise SetupError(f"parameter 'GPU_DEVICE_IDS' must list different numbers of GPUs, not '{gpus}'")
        chosen = tuple(int(part) for part in parts)
    if not chosen:
        return
    if len(chosen) < size:
        raise SetupError(
            f"'{ENGINE_FILE}' asks for {size} GPUs (tensor_parallel_size x pipeline_parallel_size), and the "
            f"model has {len(chosen)}"
        )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = seen.split(",") if seen else []
    names = [visible[each] if each < len(visible) else str(each) for each in chosen]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def adapter_of(engine: Engine, name: str) -> Any:
    """The LoRA request of an adapter; None for no name.

    Raises:
        ValueError: There is none; the texts are Triton's.
    """
    if not name:
        return None
    if engine.adapters is None:
        raise ValueError("LoRA feature is not enabled.")
    found = engine.adapters.get(name)
    if found is None:
        raise ValueError(f"LoRA {name} is not supported, we currently support {[*engine.adapters]}")
    return found
