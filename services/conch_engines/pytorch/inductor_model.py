"""AOTInductor packages, run through their C interface.

PyTorch's own Python call of such a model holds the interpreter's lock for the whole run; a call of the
library's functions through `ctypes` does not. The interface is that of ``aoti_runtime/interface.h``.

Owns: unpacked packages in a temporary folder, and containers of models. Threads and locks: one lock for
unpacking.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import re
import shutil
import threading
import weakref
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from conch.backends.signature import made_tensors
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.spec import ModelSpec
from conch.core.temporary_folder import TemporaryFolder
from conch_engines.pytorch.tensor_naming import leaf_paths, leaf_positions
from conch_engines.pytorch.torch_function import Program

_MEMBER = re.compile(r"[^/]+/data/aotinductor/([^/]+)/([^/]+)")
_OTHER_WEIGHTS = re.compile(r"[^/]+/data/weights/[^/]*_config\.json")
_OUTSIDE = b"aoti_torch_proxy_executor_call_function"
# In the package's source, of the checks that AOTI_RUNTIME_CHECK_INPUTS turns on.
_INPUT_SIZE = re.compile(r"if \((\d+) != (\w+)_size\[(\d+)\]\)")
_INPUT_STRIDE = re.compile(r"if \((\d+) != (\w+)_stride\[(\d+)\]\)")
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class PackageFolder:
    """Unpacked packages by content, kept for the life of the process.

    A library stays mapped once it was loaded, as C++ marks parts of it as unique in the process; loading the
    same package again finds it there, where a file of its own would map it once more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards unpacking
        self._folder: TemporaryFolder | None = None

    def library(self, path: Path, device: str) -> Path:
        """The library of a package, unpacked where it is not yet."""
        with self._lock:
            if self._folder is None:
                self._folder = TemporaryFolder("conch-aoti-")
                weakref.finalize(self, self._folder.release)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            target = self._folder.path / digest
            if not target.exists():
                partial = target.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                _unpack(path, partial, device)
                partial.rename(target)
            return next(target.glob("*.so"))


class InductorLibrary:
    """A package's library with a container of models on a device.

    Args:
        path: The package.
        library: Its unpacked library.
        device: ``cpu``, or ``cuda`` with a number.
        runs: Runs at the same time that the container allows; weights are shared.

    Raises:
        UnavailableError: It can't be loaded.
    """

    def __init__(self, path: Path, library: Path, device: str, runs: int) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise UnavailableError(
                f'PyTorch inductor model file "{path}" is unreachable or inaccessible: {error}'
            ) from error
        self._handle = ctypes.c_void_p()
        folder = str(library.parent).encode()
        handle, count = ctypes.byref(self._handle), ctypes.c_size_t(runs)
        self._call("CreateWithDevice", handle, count, device.encode(), folder)
        self.run = self._library.AOTInductorModelContainerRun
        self.handle = self._handle

    def call_spec(self) -> tuple[str, str]:
        """PyTorch's JSON of the trees of inputs and outputs."""
        inputs, outputs = ctypes.c_char_p(), ctypes.c_char_p()
        self._call("GetCallSpec", self._handle, ctypes.byref(inputs), ctypes.byref(outputs))
        return (inputs.value or b"").decode(), (outputs.value or b"").decode()

    def close(self) -> None:
        """Frees the models."""
        self._call("Delete", self._handle)

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, f"AOTInductorModelContainer{name}")(*arguments):
            raise InternalError(f"AOTInductor's {name} failed; its text is in the server's standard error")


def _unpack(path: Path, folder: Path, device: str) -> None:
    """Unpacks the files of the package's only model."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(each.file_size for each in archive.infolist()) > path.stat().st_size:
                raise InternalError(f"'{path}' holds compressed members, which PyTorch does not write")
            members = {name: found for name in archive.namelist() if (found := _MEMBER.fullmatch(name))}
            models = sorted({found[1] for found in members.values()})
            if len(models) != 1:
                raise InternalError(f"'{path}' holds {len(models)} AOTInductor models, expected one")
            if any(_OTHER_WEIGHTS.fullmatch(name) for name in archive.namelist()):
                raise InternalError(
                    f"'{path}' keeps its weights outside of the library; package it with "
                    f"aot_inductor.package_constants_in_so"
                )
            if not any(name.endswith(".so") for name in members):
                raise InternalError(f"'{path}' holds no compiled library")
            for name, found in members.items():
                if name.endswith("_metadata.json"):
                    _check_machine(path, json.loads(archive.read(name)), device)
                if name.endswith(".wrapper.cpp"):
                    _check_strides(path, archive.read(name).decode())
                if not name.endswith((".cpp", ".json")):
                    content = archive.read(name)
                    if _OUTSIDE in content:
                        raise InternalError(
                            f"'{path}' calls operators outside of its library (custom ones, or those that "
                            f"AOTInductor does not compile, such as torch.linalg.inv), which its C interface "
                            f"cannot; serve the model as an exported program: torch.export.save"
                        )
                    (folder / found[2]).write_bytes(content)
    except ConchError:
        raise
    except Exception as error:  # boundary: a file of the user, for which zipfile fails in many ways
        raise InternalError(f"unable to read AOTInductor package '{path}': {error}") from error


def _check_strides(path: Path, source: str) -> None:
    """Refuses code that was compiled for inputs in another order of memory: it would read wrong elements."""
    sizes = {(name, int(dim)): int(size) for size, name, dim in _INPUT_SIZE.findall(source)}
    strides = {(name, int(dim)): int(stride) for stride, name, dim in _INPUT_STRIDE.findall(source)}
    for (name, dim), stride in strides.items():
        last = max(each for of, each in (*sizes, *strides) if of == name)
        inner = [sizes.get((name, each), 0) for each in range(dim + 1, last + 1)]  # 0: dynamic
        if sizes.get((name, dim)) != 1 and all(inner) and stride != prod(inner):
            raise InvalidArgumentError(
                f"'{path}' was compiled for an input that is not contiguous (stride {stride} in dimension "
                f"{dim} of '{name}'); compile it with examples that are: example.contiguous()"
            )


def _check_machine(path: Path, metadata: Mapping[str, str], device: str) -> None:
    """Compares what the library was compiled for with this machine: a wrong one would crash."""
    kind = metadata.get("AOTI_DEVICE_KEY", "")
    if kind and kind != device.partition(":")[0]:
        raise InvalidArgumentError(
            f"'{path}' was compiled for device '{kind}', but the instance is on '{device}'; set the kind of "
            f"instance_group to KIND_{'GPU' if kind == 'cuda' else 'CPU'} or compile it again"
        )
    machine = metadata.get("AOTI_MACHINE", "")
    if machine and machine != platform.machine():
        raise InvalidArgumentError(
            f"'{path}' was compiled for {machine}, but this machine is {platform.machine()}; compile it here"
        )
    needed = metadata.get("AOTI_CPU_ISA", "").lower().split()
    missing = [name for name in needed if name not in _processor_features()]
    if kind == "cpu" and missing:
        raise InvalidArgumentError(
            f"'{path}' needs {' '.join(missing).upper()}, which this processor lacks; compile it here"
        )


def _processor_features() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    # Linux writes avx512f and avx512_vnni where PyTorch writes AVX512 and AVX512_VNNI; NEON is asimd.
    return flags.replace("asimd", "neon asimd")


class InductorProgram(Program):
    """An AOTInductor model with the config's names."""

    keeps_inputs = False  # a package does not tell

    def __init__(self, torch: Any, spec: ModelSpec, library: InductorLibrary, stream: Any = None) -> None:
        self._library = library
        self._handles_of = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        self._tensors_of = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
        self.failure = f'Inductor model instance "{spec.name}" execution failure: '
        inputs, outputs = library.call_spec()
        input_paths, output_paths = leaf_paths(inputs, ""), leaf_paths(outputs, "RESULT")
        names = [tensor.name for tensor in (*spec.model_inputs, *made_tensors(spec))]
        places = {
            place: name for name, place in leaf_positions(spec.name, "input", names, input_paths).items()
        }
        self.leaves: Sequence[str] = tuple(places[place] for place in range(len(names)))
        self.results: Mapping[str, int] = leaf_positions(
            spec.name, "output", [tensor.name for tensor in spec.model_outputs], output_paths
        )
        self._inputs_type = ctypes.c_void_p * len(input_paths)
        self._outputs_type = ctypes.c_void_p * len(output_paths)
        self._counts = ctypes.c_size_t(len(input_paths)), ctypes.c_size_t(len(output_paths))
        self._stream = stream

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Runs the model; the interpreter's lock is free meanwhile."""
        given = self._inputs_type(*[_capsule_pointer(each, None) for each in self._handles_of(values)])
        found = self._outputs_type()
        inputs, outputs = self._counts
        failed = self._library.run(self._library.handle, given, inputs, found, outputs, self._stream, None)
        if failed:
            raise InternalError(
                f"{self.failure}the compiled model refused its inputs; its text is in the server's standard "
                f"error, and shapes must be those that it was exported for"
            )
        results: Sequence[Any] = self._tensors_of([_new_capsule(each, None, None) for each in found])
        return results

    def close(self) -> None:
        """Drops the container."""
        self._library.close()
