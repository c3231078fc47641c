"""Runs one instance of a PyTorch model: arrays to tensors, one call of the program, tensors to arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from conch.backends.device_arrays import ALIGNMENT, Places
from conch.core.device import DeviceMemory, DeviceTensor
from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.pytorch.torch_arrays import TensorConverter, torch_dtypes
from conch_engines.pytorch.torch_settings import TorchSettings


class Program(ABC):
    """A loaded model; several threads may call it at the same time.

    Attributes:
        leaves: The config's name of each value that a call takes, in order; empty where no input feeds it.
        results: The place of each output among the results.
        failure: Beginning of the error text of a run.
        keeps_inputs: True if a run leaves the memory of its inputs as it is.
    """

    leaves: Sequence[str]
    results: Mapping[str, int]
    failure: str
    keeps_inputs: bool

    def convert(self, leaf: int, value: Any) -> Any:
        """The value for a leaf from an input, or from None where the input was left out."""
        if value is None:
            raise InvalidArgumentError(f"input '{self.leaves[leaf]}' is missing")
        return value

    def check(self, values: Sequence[Any]) -> None:
        """Refuses values that the program can't take and would not refuse itself."""

    @abstractmethod
    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Runs the model on tensors of its device; returns the flattened results."""

    @abstractmethod
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
        """Runs the model once."""
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
        except (ConchError, MemoryError):
            raise
        except Exception as error:  # of the engine
            raise InternalError(f"{program.failure}{engine_text(error)}") from error

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


_ASYNC_HINT = (
    " (errors of a GPU are reported late: run the server with CUDA_LAUNCH_BLOCKING=1 to see where it arose)"
)


class TorchDeviceFunction(TorchFunction):
    """A `DeviceFunction` and an `ArrayFunction` on one GPU."""

    def __init__(
        self, torch: Any, spec: ModelSpec, program: Program, settings: TorchSettings, device_id: int
    ) -> None:
        super().__init__(torch, spec, program, settings)
        self.device_id = device_id
        self._device = torch.device("cuda", device_id)
        self._stream = torch.cuda.Stream(self._device)
        self._dtypes = torch_dtypes(torch)
        self._outputs = {tensor.name: tensor for tensor in spec.model_outputs}
        self._pinned: dict[str, Any] = {}

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        """Runs the model once with inputs and outputs in host memory."""
        results = self.on_device(inputs, outputs, {})
        return {name: value for name, value in results.items() if not isinstance(value, DeviceTensor)}

    def on_device(
        self, inputs: Mapping[str, Array | DeviceTensor], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Array | DeviceTensor]:
        """Runs the model once on its stream."""
        torch, leaves = self._torch, self._program.leaves
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self._stream))
            if not self._settings.cudnn:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            values = [self._on_device(leaf, name, inputs) for leaf, name in enumerate(leaves)]
            found = self._run(values)
            results = self._results(found, outputs, places)
            try:
                self._stream.synchronize()
            except RuntimeError as error:
                raise InternalError(f"{self._program.failure}{engine_text(error)}{_ASYNC_HINT}") from error
            if self._settings.cleans_cache:
                torch.cuda.empty_cache()
        return {
            name: value if isinstance(value, DeviceTensor) else self._converter.array(name, value)
            for name, value in results.items()
        }

    def _on_device(self, leaf: int, name: str, inputs: Mapping[str, Array | DeviceTensor]) -> Any:
        """The value of a leaf in the device's memory."""
        value = inputs.get(name)
        if value is None:
            return self._program.convert(leaf, None)
        if isinstance(value, DeviceTensor):
            tensor = self._torch.from_dlpack(value)
            return self._program.convert(leaf, tensor if self._keeps_inputs else tensor.clone())
        tensor = self._converter.tensor(name, value)
        if not isinstance(tensor, list):
            tensor = self._staged(f"input {name}", tensor).to(self._device, non_blocking=True)
        return self._program.convert(leaf, tensor)

    def _staged(self, key: str, tensor: Any) -> Any:
        """A copy in pinned memory of this instance, from which the device copies without waiting."""
        staged = self._pinned_like(key, tensor)
        staged.copy_(tensor)
        return staged

    def _pinned_like(self, key: str, tensor: Any) -> Any:
        """Pinned memory for a tensor; grows and is used again by the next run."""
        count = tensor.numel()
        buffer = self._pinned.get(key)
        if buffer is None or buffer.numel() < count or buffer.dtype is not tensor.dtype:
            buffer = self._torch.empty(count, dtype=tensor.dtype, pin_memory=True)
            self._pinned[key] = buffer
        return buffer[:count].view(tensor.shape)

    def _results(self, found: Sequence[Any], outputs: tuple[str, ...], places: Places) -> dict[str, Any]:
        """Outputs as device tensors where clients want them there, else on their way to the host."""
        results: dict[str, Any] = {}
        for name in outputs:
            value = self._result(found, name)
            if isinstance(value, list):
                results[name] = value
                continue
            self._converter.check(self._outputs[name], value)
            value = value.detach().contiguous()
            if name in places:
                results[name] = self._placed(name, value, places[name])
            elif value.device.type == "cpu":
                results[name] = value
            else:
                # Fresh pinned memory: the response keeps it until it is sent.
                host = self._torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                results[name] = host.copy_(value, non_blocking=True)
        return results

    def _placed(self, name: str, value: Any, places: tuple[DeviceMemory, ...]) -> DeviceTensor:
        """An output in device memory; for one request in the client's own, where it fits."""
        datatype = self._outputs[name].datatype
        value = value.to(self._device, non_blocking=True)
        nbytes = value.numel() * value.element_size()
        place = places[0]
        if len(places) == 1 and nbytes <= place.nbytes and not place.pointer % ALIGNMENT:
            memory = place.part(0, nbytes)
            target = DeviceTensor(name, datatype, tuple(value.shape), memory)
            self._torch.from_dlpack(target).copy_(value, non_blocking=True)
            return target
        memory = place.view_owned_by(value.data_ptr(), nbytes, value)
        return DeviceTensor(name, datatype, tuple(value.shape), memory)

    def close(self) -> None:
        """Frees the pinned memory."""
        self._pinned.clear()
