"""Runs one instance of a PyTorch model: arrays to tensors, one call of the program, tensors to arrays.

Used by: `pytorch_backend`, `torch_device`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.pytorch.torch_arrays import TensorConverter
from conch_engines.pytorch.torch_settings import TorchSettings


class Program(Protocol):
    """A loaded model; several threads may call it at the same time.

    Attributes:
        leaves: The config's name of each value that a call takes, in order; empty where no input feeds it.
        results: The place of each output among the results.
        failure: How an error text of a run begins.
        keeps_inputs: Whether a run leaves the memory of its inputs as it is.
    """

    leaves: Sequence[str]
    results: Mapping[str, int]
    failure: str
    keeps_inputs: bool

    def convert(self, leaf: int, value: Any) -> Any:
        """The value for a leaf from an input, or from None where the input was left out."""

    def check(self, values: Sequence[Any]) -> None:
        """Refuses values that the program can't take. Raises ConchError: the text says why."""

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Runs the model on tensors of its device; returns the flattened results."""

    def close(self) -> None:
        """Frees what the program holds; called once, when nothing runs."""


class TorchFunction:
    """An `ArrayFunction` on the CPU."""

    def __init__(self, torch: Any, spec: ModelSpec, program: Program, settings: TorchSettings) -> None:
        self._torch = torch
        self._converter = TensorConverter(torch, spec)
        self._program = program
        self._settings = settings
        self._set_threads = torch.set_num_threads
        # One for all runs: an instance runs one batch at a time.
        self._mode = torch.inference_mode() if settings.inference_mode else torch.no_grad()
        self._keeps_inputs = program.keeps_inputs
        self.warmup_runs = settings.warmup_runs

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        """Runs the model once; see `ArrayFunction`."""
        values = [self._value(leaf, name, inputs) for leaf, name in enumerate(self._program.leaves)]
        found = self._run(values)
        array = self._converter.array
        return {name: array(name, self._result(found, name)) for name in outputs}

    def _value(self, leaf: int, name: str, inputs: Mapping[str, Array]) -> Any:
        array = inputs.get(name)
        value = None if array is None else self._converter.tensor(name, array)
        if not self._keeps_inputs and value is not None and not isinstance(value, list):
            value = value.clone()
        return self._program.convert(leaf, value)

    def _run(self, values: list[Any]) -> Sequence[Any]:
        """One call of the program under the model's settings."""
        program = self._program
        program.check(values)
        self._set_threads(self._settings.threads)
        try:
            with self._mode:
                return program(values) if self._settings.optimized else self._run_plain(values)
        except ConchError:
            raise
        except MemoryError:
            raise
        except Exception as error:
            raise InternalError(f"{program.failure}{error}") from error

    def _run_plain(self, values: list[Any]) -> Sequence[Any]:
        with self._torch.jit.optimized_execution(False):
            return self._program(values)

    def _result(self, found: Sequence[Any], name: str) -> Any:
        place = self._program.results[name]
        if place >= len(found):
            raise InvalidArgumentError(
                f"The output {name} in the model configuration refers to an output index which doesn't "
                f"exist. This model has {len(found)} outputs"
            )
        value = found[place]
        if not isinstance(value, (self._torch.Tensor, list)):
            raise InternalError(
                f"{self._program.failure}output must be of type Tensor, List[str] or Tuple containing one of "
                f"these two types. It should not be a List / Dictionary of Tensors or a Scalar"
            )
        return value
