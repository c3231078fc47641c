"""`PyTorchBackend`: finds out what a file is and loads it with the matching form.

Owns: per model version, the loaded programs, one per device unless weights are not shared.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.backends.arrays import ArrayInstance
from conch.backends.signature import complete, validate
from conch.core import file_formats
from conch.core.backend import Backend, BackendInstance, BackendModel, ConfigNotes
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution.placement import Placement, place
from conch.core.file_formats import AOT_INDUCTOR, EXPORTED_PROGRAM, TORCHSCRIPT, FileFormat
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES
from conch.workers.python_based import PythonBasedBackend
from conch_engines.model_config import parameter_texts
from conch_engines.pytorch.exported_model import ExportedProgram, ProgramDescription, load_program
from conch_engines.pytorch.inductor_model import InductorLibrary, InductorProgram, PackageFolder
from conch_engines.pytorch.torch_arrays import accept_read_only
from conch_engines.pytorch.torch_function import Program, TorchFunction
from conch_engines.pytorch.torch_settings import (
    ALLOW_PICKLE,
    PARAMETERS,
    SHARING,
    ProcessSettings,
    TorchSettings,
)
from conch_engines.pytorch.torchscript_model import TorchScriptProgram, arguments_of, load_module

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls

log = logging.getLogger(__name__)

_FORMS = (TORCHSCRIPT, EXPORTED_PROGRAM, AOT_INDUCTOR)


class PyTorchBackend(Backend):
    """The backend ``pytorch``."""

    default_model_file = "model.pt"
    platform = "pytorch_libtorch"
    parameters = PARAMETERS
    passes_parameters = False

    def __init__(self) -> None:
        # Imported late: configs can be read without the framework.
        import torch

        self._torch: Any = torch
        accept_read_only(torch)
        self._process = ProcessSettings(torch)
        self._classes = PythonClassBackend()
        self._packages = PackageFolder()

    @property
    def uses_gpus(self) -> bool:
        """True if the installed PyTorch can use a GPU."""
        return bool(self._torch.cuda.is_available())

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Takes inputs, outputs and batching from an exported program; other forms do not tell them."""
        name = config.get("name", "")
        if (config.get("input") and config.get("output")) or is_python_class(config):
            return config
        path = _model_path(version_directory, config.get("default_model_filename", ""), name)
        form = _form(path)
        if form is EXPORTED_PROGRAM:
            allow = parameter_texts(config).get(ALLOW_PICKLE, "").lower() == "true"
            program = load_program(self._torch, path, allow)
            return complete(config, ProgramDescription(self._torch, program, name).signature, options)
        advice = (
            f"the config must list inputs and outputs, as '{path}' is {form.what}, which tells neither "
            f"shapes nor datatypes"
        )
        if config.get("input"):
            raise InternalError(
                f"model configuration must contain at least one output, none were specified; {advice}. Add "
                f'for each: output [ {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ ... ] }} ]'
            )
        if form is AOT_INDUCTOR:
            raise InternalError(
                f"model configuration must contain at least one input, none were specified; {advice}. Add "
                f'for each: input [ {{ name: "ARGS[0]" data_type: TYPE_FP32 dims: [ ... ] }} ], and outputs'
            )
        arguments = [argument.name for argument in arguments_of(load_module(self._torch, path, "cpu"))]
        raise InvalidArgumentError(
            f"unable to load model '{name}', configuration expects 0 inputs, model provides "
            f"{len(arguments)}; {advice}. Its inputs are: {', '.join(arguments)}. Add for each: input [ "
            f"{{ name: \"...\" data_type: TYPE_FP32 dims: [ ... ] }} ], and outputs 'OUTPUT__0' and so on"
        )

    def check(self, spec: ModelSpec) -> None:
        """Checks parameters, the form of the file, and names and shapes where the file tells them."""
        if is_python_class(spec.config):
            self._classes.check(spec)
            return
        settings = TorchSettings.of(spec)
        _check_controls(spec)
        path = _model_path(spec.version_directory, spec.model_file, spec.name)
        form = _form(path)
        if form is EXPORTED_PROGRAM:
            program = load_program(self._torch, path, settings.allow_pickle)
            signature = ProgramDescription(self._torch, program, spec.name).named(spec)
            validate(spec, signature, ELEMENT_SIZES)

    def warnings(self, spec: ModelSpec) -> Iterable[str]:
        """Missing imports of a Python class's file."""
        return self._classes.warnings(spec) if is_python_class(spec.config) else ()

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version; its programs are loaded for the first instance on each device."""
        if is_python_class(spec.config):
            return self._classes.load(spec)
        return _TorchModel(self._torch, spec, self._process, self._packages)

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """As `load`; Python classes run as Python models do."""
        return self._classes.load_within(spec, calls) if is_python_class(spec.config) else self.load(spec)


class _TorchModel(BackendModel):
    """A loaded version: programs by device."""

    def __init__(
        self, torch: Any, spec: ModelSpec, process: ProcessSettings, packages: PackageFolder
    ) -> None:
        self._torch = torch
        self._spec = spec
        self._packages = packages
        self._settings = TorchSettings.of(spec)
        _check_controls(spec)
        self._path = _model_path(spec.version_directory, spec.model_file, spec.name)
        self._form = _form(self._path)
        self._programs: list[Program] = []
        self._shared: dict[str | None, Program] = {}
        self._placements = place(spec.instance_groups)
        self.notes = ConfigNotes()
        process.apply(spec, self.notes)
        self._settings.log(spec)
        log.info(
            "model '%s' is %s; each CPU instance runs with %d threads",
            spec.name,
            self._form.what,
            self._settings.threads,
        )

    def create_instance(self, placement: Placement) -> BackendInstance:
        device = _device_of(placement)
        program = self._shared.get(device) if self._settings.shares_weights else None
        if program is None:
            started = time.monotonic()
            program = self._load(device)
            log.info(
                "model '%s' loaded to %s in %.2f s",
                self._spec.name,
                device or "the devices it names",
                time.monotonic() - started,
            )
            self._programs.append(program)
            self._shared[device] = program
        elif SHARING in self._spec.parameters:  # as in Triton, which does not share unless told to
            log.info("Reusing TorchScript model for instance '%s'", self._spec.name)
        if placement.kind == "GPU":
            from conch_engines.pytorch.torch_function import TorchDeviceFunction

            function: TorchFunction = TorchDeviceFunction(
                self._torch, self._spec, program, self._settings, placement.device_id
            )
        else:
            function = TorchFunction(self._torch, self._spec, program, self._settings)
        return ArrayInstance(self._spec, function)

    def _load(self, device: str | None) -> Program:
        torch, spec = self._torch, self._spec
        if self._form is TORCHSCRIPT:
            return TorchScriptProgram(torch, spec, load_module(torch, self._path, device))
        if self._form is EXPORTED_PROGRAM:
            program = load_program(torch, self._path, self._settings.allow_pickle)
            return ExportedProgram(torch, spec, program, device)
        runs = sum(_device_of(placement) == device for placement in self._placements)
        device = device or "cpu"
        unpacked = self._packages.library(self._path, device)
        return InductorProgram(torch, spec, InductorLibrary(self._path, unpacked, device, max(runs, 1)))

    def close(self) -> None:
        """Frees the programs, and the device memory that PyTorch keeps for later."""
        self._shared.clear()
        while self._programs:
            self._programs.pop().close()
        gc.collect()
        if any(placement.kind == "GPU" for placement in self._placements):
            self._torch.cuda.empty_cache()


class PythonClassBackend(PythonBasedBackend):
    """Python classes as Python models: `python_class_model` runs each, the model's own file has the class."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).parent)

    def _file(self, version_directory: Path, name: str) -> str:
        return str(Path(__file__).with_name("python_class_model.py"))


def is_python_class(config: Mapping[str, Any]) -> bool:
    """True if a config names a Python class instead of a saved program."""
    return config.get("runtime") == "model.py"


def _check_controls(spec: ModelSpec) -> None:
    """Refuses strings as controls, which tensors cannot hold."""
    for control in () if spec.sequence is None else spec.sequence.controls:
        if control.datatype == "BYTES":
            raise InternalError(f"input '{control.name}' type 'TYPE_STRING' is not supported by PyTorch.")


def _device_of(placement: Placement) -> str | None:
    """PyTorch's name of a device; None where the module places itself."""
    if placement.kind == "GPU":
        return f"cuda:{placement.device_id}"
    return None if placement.kind == "MODEL" else "cpu"


def _model_path(version_directory: Path, file_name: str, model_name: str) -> Path:
    path = version_directory / (file_name or PyTorchBackend.default_model_file)
    if not path.exists():
        raise UnavailableError(f"unable to find '{path}' for model instance '{model_name}'")
    return path


def _form(path: Path) -> FileFormat:
    """Format of a file. Raises InvalidArgumentError: the backend does not serve it."""
    found = file_formats.identify(path)
    if found in _FORMS:
        assert found is not None
        return found
    is_what = file_formats.describe(path) or "is no file that PyTorch wrote, or a damaged one"
    raise InvalidArgumentError(
        f"unable to load '{path}': it {is_what}. Backend 'pytorch' serves files of torch.jit.save "
        f"(model.pt), of torch.export.save and of AOTInductor (model.pt2)"
    )
