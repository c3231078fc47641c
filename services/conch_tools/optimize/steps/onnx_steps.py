"""Steps of ONNX models, by onnx, ONNX Runtime and onnxslim."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from conch_tools.optimize.steps.step_main import Arrays, Job, Opened

FILE = "model.onnx"
_PROVIDERS = ["CPUExecutionProvider"]
_LARGEST = 1 << 31
"""Bytes of the largest message of protobuf; larger models have their weights in files of their own."""
_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(double)": "FP64",
    "tensor(float)": "FP32",
    "tensor(float16)": "FP16",
    "tensor(string)": "BYTES",
    **{f"tensor(int{bits})": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"tensor(uint{bits})": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}


def open_model(job: Job) -> Opened:
    """Opens a model in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(job.source), options, providers=_PROVIDERS)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    batching = all(each.shape and not isinstance(each.shape[0], int) for each in [*inputs, *outputs])
    names = [each.name for each in outputs]

    def run(arrays: Arrays) -> Arrays:
        given = {
            name: np.char.decode(array, "utf-8").astype(object) if array.dtype.kind == "S" else array
            for name, array in arrays.items()
        }
        return dict(zip(names, map(np.asarray, session.run(names, given)), strict=True))

    signature = {
        "batching": batching,
        "inputs": [_tensor(each, batching) for each in inputs],
        "outputs": [_tensor(each, batching) for each in outputs],
    }
    return signature, run


def keep(job: Job) -> None:
    """Copies a model with the files of its weights."""
    import onnx

    model = onnx.load(job.source, load_external_data=False)
    shutil.copyfile(job.source, job.folder / FILE)
    for name in sorted(set(_external_files(model))):
        place = job.folder / name
        if not place.resolve().is_relative_to(job.folder.resolve()):
            raise ValueError(f"its weights are in '{name}', outside of the model's folder")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(job.source.parent / name, place)


def optimize_graph(job: Job) -> None:
    """Writes the graph as ONNX Runtime has optimised it; the level is one whose result runs on any CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(job.folder / FILE)
    if sum(each.stat().st_size for each in job.source.parent.iterdir() if each.is_file()) >= _LARGEST:
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    onnxruntime.InferenceSession(str(job.source), options, providers=_PROVIDERS)


def slim(job: Job) -> None:
    """Simplifies the graph with onnxslim."""
    import onnx
    import onnxslim

    _save(onnxslim.slim(onnx.load(job.source)), job)


def to_fp16(job: Job) -> None:
    """Stores and computes floats with 16 bits; inputs and outputs stay as they are."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    _save(convert_float_to_float16(onnx.load(job.source), keep_io_types=True), job)


def quantize_dynamic(job: Job) -> None:
    """Stores weights as int8, of 7 bits where sums overflow; scales of activations come from each run."""
    import onnx
    from onnxruntime import quantization

    model = onnx.load(job.source)
    # Shapes that an exporter has left contradict those that the quantiser infers of its own.
    del model.graph.value_info[:]
    plain = job.folder / "plain.onnx"
    onnx.save(model, plain)
    quantization.quantize_dynamic(
        plain, job.folder / FILE, per_channel=True, reduce_range=job.options.get("reduce_range", False)
    )
    _remove(plain)
    _check_quantized(job)


def quantize_static(job: Job) -> None:
    """As `quantize_dynamic`, and computes with int8; scales of activations come from the samples."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(job.source)
    del model.graph.value_info[:]
    plain, prepared = job.folder / "plain.onnx", job.folder / "prepared.onnx"
    onnx.save(model, plain)
    quant_pre_process(plain, prepared)
    quantization.quantize_static(
        prepared,
        job.folder / FILE,
        _Batches(job),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        reduce_range=job.options.get("reduce_range", False),
    )
    _remove(plain, prepared)
    _check_quantized(job)


class _Batches:
    """The samples for ONNX Runtime's quantiser, which calls `get_next` until it returns None."""

    def __init__(self, job: Job) -> None:
        self._requests = self._batches(job.samples(), job.batch)

    def get_next(self) -> Arrays | None:
        """The inputs of the next run."""
        return next(self._requests, None)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Ignores the range: only strided calibration has one."""

    @staticmethod
    def _batches(samples: Arrays, batch: int) -> Iterator[Arrays]:
        rows = len(next(iter(samples.values())))
        for start in range(0, rows, batch or 1):
            chunk = {name: array[start : start + (batch or 1)] for name, array in samples.items()}
            yield chunk if batch else {name: array[0] for name, array in chunk.items()}


def _check_quantized(job: Job) -> None:
    import onnx

    kinds = {"DequantizeLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QLinearMatMul"}
    model = onnx.load(job.folder / FILE, load_external_data=False)
    if not any(node.op_type in kinds for node in model.graph.node):
        raise NotImplementedError("the model has no operator that ONNX Runtime quantises")


def _save(model: Any, job: Job) -> None:
    import onnx

    large = model.ByteSize() >= _LARGEST
    onnx.save(model, job.folder / FILE, save_as_external_data=large, location="weights" if large else None)


def _remove(*paths: Any) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _external_files(model: Any) -> Iterator[str]:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value


def _tensor(value: Any, batching: bool) -> dict[str, Any]:
    datatype = _DATATYPES.get(value.type)
    if datatype is None:
        raise ValueError(f"tensor '{value.name}' has the type {value.type}, which conch does not serve")
    dims = [each if isinstance(each, int) else -1 for each in value.shape]
    return {"name": value.name, "datatype": datatype, "dims": dims[1:] if batching else dims}
