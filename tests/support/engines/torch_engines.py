"""PyTorch's forms for the contract suite."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from tests.support.engines.engine import WIDTH, Engine

from conch.core.tensor import ELEMENT_SIZES, Array
from conch_engines.pytorch.torch_arrays import torch_dtypes

TORCH_TYPES = tuple(ELEMENT_SIZES)


def affine(level: float) -> Any:
    """A linear layer whose output is shifted by `level`."""
    import torch

    class Affine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linear = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + level

    return Affine().eval()


def unsized() -> Any:
    """Returns its input, of one element, as a tensor of rank 0."""
    import torch

    class Unsized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(())

    return Unsized().eval()


def traced(module: Any, *samples: Any) -> Any:
    """A module as TorchScript."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, samples)


def exported(module: Any, samples: tuple[Any, ...], **options: Any) -> Any:
    """A module as an exported program with a batch of 1 to 64 rows."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options.setdefault("dynamic_shapes", tuple({0: batch} for _ in samples))
        return torch.export.export(module, samples, **options)


class TorchScriptEngine(Engine):
    """TorchScript."""

    name = "torchscript"
    backend = "pytorch"
    packages = ("torch",)
    file = "model.pt"
    platform = "pytorch_libtorch"
    datatypes = (*TORCH_TYPES, "BYTES")
    allocates = True
    scalars = ("FP32", "BOOL")
    completes = False

    def write(self, version: Path, level: float) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(traced(affine(level), torch.zeros(2, WIDTH)), version / self.file)

    def write_identity(self, version: Path, datatype: str) -> None:
        import torch

        class Same(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        class SameText(torch.nn.Module):
            def forward(self, x: list[str]) -> list[str]:
                return x

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.script(SameText() if datatype == "BYTES" else Same())
            torch.jit.save(module, version / self.file)

    def write_scalar(self, version: Path, datatype: str) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(unsized()), version / self.file)

    def write_allocating(self, version: Path) -> None:
        import torch

        class Ones(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 0 + torch.ones(int(x[0, 0]), int(x[0, 1]), int(x[0, 2]), int(x[0, 3])).sum()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(Ones()), version / self.file)

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _called(torch.jit.load(version / self.file).forward, "y")


class ExportedEngine(Engine):
    """Programs of torch.export."""

    name = "exported"
    backend = "pytorch"
    packages = ("torch",)
    file = "model.pt2"
    platform = "torch_aoti"
    outputs: ClassVar[Mapping[str, tuple[int, ...]]] = {"OUTPUT__0": (WIDTH,)}
    identity_names = ("x", "OUTPUT__0")
    scalars = ("FP32", "BOOL")

    def write(self, version: Path, level: float) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(exported(affine(level), (torch.zeros(2, WIDTH),)), version / self.file)

    def write_scalar(self, version: Path, datatype: str) -> None:
        import torch

        sample = torch.zeros((), dtype=torch_dtypes(torch)[datatype])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(exported(unsized(), (sample,), dynamic_shapes=None), version / self.file)

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _called(torch.export.load(version / self.file).module().forward, "OUTPUT__0")


class InductorEngine(Engine):
    """AOTInductor packages; compiling one takes half a minute, so they are kept by version and source."""

    name = "inductor"
    backend = "pytorch"
    packages = ("torch",)
    file = "model.pt2"
    platform = "torch_aoti"
    input = "INPUT__0"
    outputs: ClassVar[Mapping[str, tuple[int, ...]]] = {"RESULT": (WIDTH,)}
    identity_names = ("INPUT__0", "RESULT")
    scalars = ("FP32",)
    completes = False
    slow = True

    def write(self, version: Path, level: float) -> None:
        import torch

        self._write(version, str(level), affine(level), torch.zeros(2, WIDTH))

    def write_scalar(self, version: Path, datatype: str) -> None:
        import torch

        self._write(version, datatype, unsized(), torch.zeros(()), dynamic_shapes=None)

    def _write(self, version: Path, key: str, module: Any, sample: Any, **options: Any) -> None:
        import torch

        source = f"{torch.__version__} {Path(__file__).read_text()} {key}"
        kept = Path(tempfile.gettempdir(), f"conch_aoti_{hashlib.sha256(source.encode()).hexdigest()}.pt2")
        if not kept.exists():
            with suppress(ImportError):
                # Its thread, for bars of long compilations, would never end.
                importlib.import_module("tqdm").tqdm.monitor_interval = 0
            program = exported(module, (sample,), **options)
            made = version / "made.pt2"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch._inductor.aoti_compile_and_package(program, package_path=str(made))
            made.rename(kept)
        shutil.copyfile(kept, version / self.file)

    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _called(torch._inductor.aoti_load_package(str(version / self.file)), "RESULT")


def _called(forward: Any, output: str) -> Callable[[Array], dict[str, Array]]:
    """A function of tensors as one of arrays."""
    import torch

    def call(rows: Array) -> dict[str, Array]:
        with torch.inference_mode():
            result = forward(torch.from_numpy(rows))
        return {output: result.numpy()}

    return call
