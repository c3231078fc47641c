"""Steps of TensorFlow: SavedModels to TF-Lite and ONNX."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch_tools.optimize.steps.step_main import Arrays, Job, Opened

_SIGNATURE = "serving_default"
_OPSET = 18
_DATATYPES = {
    "bool": "BOOL",
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "string": "BYTES",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}


def open_saved_model(job: Job) -> Opened:
    """Opens a SavedModel with one thread."""
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    loaded = tensorflow.saved_model.load(str(job.source))
    if _SIGNATURE not in loaded.signatures:
        raise ValueError(
            f"the SavedModel has no signature '{_SIGNATURE}'; it has {', '.join(loaded.signatures) or 'none'}"
        )
    function = loaded.signatures[_SIGNATURE]
    inputs, outputs = function.structured_input_signature[1], function.structured_outputs
    specs = [*inputs.values(), *outputs.values()]
    batching = all(each.shape.rank and each.shape[0] is None for each in specs)

    def run(arrays: Arrays) -> Arrays:
        found = function(**{name: tensorflow.constant(array) for name, array in arrays.items()})
        return {name: each.numpy() for name, each in found.items()}

    run.model = loaded  # type: ignore[attr-defined]  # its variables go with it
    signature = {
        "batching": batching,
        "inputs": [_tensor(name, each, batching) for name, each in inputs.items()],
        "outputs": [_tensor(name, each, batching) for name, each in sorted(outputs.items())],
    }
    return signature, run


def keep(job: Job) -> dict[str, Any]:
    """Copies the original; conch runs it in this environment, unless it has TensorFlow itself."""
    shutil.copytree(job.source, job.folder / job.options["file"])
    own = sys.prefix == job.options["conch_prefix"]
    return {} if own else {"parameters": {"EXECUTION_ENV_PATH": sys.prefix}}


def to_tflite(job: Job) -> None:
    """Converts to TF-Lite with 32 bits."""
    _convert(job)


def to_tflite_half(job: Job) -> None:
    """Converts to TF-Lite; weights are stored with 16 bits."""
    import tensorflow

    _convert(job, tensorflow.float16)


def to_tflite_int8(job: Job) -> None:
    """Converts to TF-Lite; weights are stored with 8 bits, scales of activations are computed in each run."""
    import tensorflow

    _convert(job, tensorflow.int8)


def to_onnx(job: Job) -> dict[str, Any]:
    """Converts to ONNX by tf2onnx, which is a program of its own."""
    import onnx

    file = job.folder / "model.onnx"
    command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(job.source)]
    command += ["--output", str(file), "--opset", str(_OPSET), "--signature_def", _SIGNATURE]
    if (code := subprocess.run(command, check=False).returncode) != 0:
        raise ValueError(f"tf2onnx.convert ended with exit code {code}; the log has its output")
    model = onnx.load(file)
    facts: dict[str, Any] = {}
    for word, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        originals = {each["name"]: each for each in job.signature[word]}
        facts[word] = []
        for value in values:
            name = value.name.removesuffix(":0")
            if name not in originals:
                raise ValueError(
                    f"tf2onnx has named a tensor '{value.name}'; expected {', '.join(originals)}"
                )
            facts[word].append({**originals[name], "name": value.name})
            if name != value.name:
                facts[word][-1]["reference"] = name
            dims = value.type.tensor_type.shape.dim
            if job.batch and dims:
                dims[0].dim_param = "batch"  # it makes up another name for each tensor
    onnx.save(model, file)
    return facts


def to_openvino(job: Job) -> None:
    """Converts to OpenVINO, which reads SavedModels."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would send usage data
    import openvino

    model = openvino.convert_model(job.source)
    openvino.save_model(model, job.folder / "model.xml", compress_to_fp16=False)


def _convert(job: Job, weights: Any = None) -> None:
    import tensorflow

    converter = tensorflow.lite.TFLiteConverter.from_saved_model(str(job.source), signature_keys=[_SIGNATURE])
    if weights is not None:
        converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
        if weights == tensorflow.float16:
            converter.target_spec.supported_types = [weights]
    (job.folder / "model.tflite").write_bytes(converter.convert())


def _tensor(name: str, value: Any, batching: bool) -> dict[str, Any]:
    dtype = value.dtype.name
    datatype = _DATATYPES.get(dtype)
    if datatype is None:
        raise ValueError(f"tensor '{name}' is of {dtype}, for which there is no datatype")
    dims = [-1 if each is None else each for each in value.shape]
    return {"name": name, "datatype": datatype, "dims": dims[1:] if batching else dims}
