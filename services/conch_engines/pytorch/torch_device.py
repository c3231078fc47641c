"""Runs a PyTorch model on a GPU: one stream per instance, pinned staging, tensors of clients used in place.

Owns: per instance a stream and pinned buffers. Copies of inputs and outputs run on the stream beside the
computation, and one synchronisation ends a run. Used by: `pytorch_backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from conch.backends.device_arrays import ALIGNMENT, Places
from conch.core.device import DeviceMemory, DeviceTensor
from conch.core.errors import InternalError
from conch.core.spec import ModelSpec
from conch.core.tensor import Array
from conch_engines.pytorch.torch_arrays import torch_dtypes
from conch_engines.pytorch.torch_function import Program, TorchFunction
from conch_engines.pytorch.torch_settings import TorchSettings

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
        """Runs the model once on its stream; see `DeviceFunction`."""
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
                raise InternalError(f"{self._program.failure}{error}{_ASYNC_HINT}") from error
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
        memory = place.owned(value.data_ptr(), nbytes, value)
        return DeviceTensor(name, datatype, tuple(value.shape), memory)

    def close(self) -> None:
        """Frees the pinned memory."""
        self._pinned.clear()
