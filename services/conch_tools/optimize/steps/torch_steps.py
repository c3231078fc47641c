"""Steps of PyTorch: modules, TorchScript, exported programs, AOTInductor packages, and ONNX from all of them.

Inputs and outputs have numbers for names, ``INPUT__0`` and ``OUTPUT__0``, which conch's backend takes for all
forms. Loading a module or a program runs code that comes with it.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from conch_tools.optimize.steps.step_main import Arrays, Job, Opened

_ONNX_FILE = "model.onnx"
_PROGRAM = "model.pt2"
_SCRIPT = "model.pt"
_TRACED_ROWS = 2
"""Rows of the example to trace with: PyTorch takes one row for a constant."""
_DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    "uint8": "UINT8",
}


def keep(job: Job) -> None:
    """Copies the original."""
    shutil.copyfile(job.source, job.folder / job.options["file"])


def open_module(job: Job) -> Opened:
    """Calls the user's function; the module runs with one thread."""
    module, example = _made(job)
    names = _arguments(module)
    samples = job.samples()
    arrays = _ordered(samples, names) if samples else [each.numpy() for each in example]
    if not arrays:
        raise ValueError(
            f"'{job.options['function']}' returns a module alone, so its inputs are not known: give --data, "
            f"or return the module and a tuple of example inputs with a batch dimension"
        )
    return _opened(job, module, arrays, names)


def open_script(job: Job) -> Opened:
    """Opens a TorchScript module; the samples tell its inputs."""
    module = _script(job)
    names = [each.name for each in module.forward.schema.arguments[1:]]
    samples = job.samples()
    if not samples:
        raise ValueError("TorchScript does not tell the shapes of its inputs: give --data")
    return _opened(job, module, _ordered(samples, names), names)


def open_program(job: Job) -> Opened:
    """Opens an exported program."""
    import torch

    program = torch.export.load(job.source)
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = [str(name) for name in program.graph_signature.user_inputs]
    inputs = [nodes[name] for name in names]
    batching = all(each.ndim and not isinstance(each.shape[0], int) for each in inputs)
    signature, run = _runner(program.module(check_guards=False), len(inputs), batching)
    signature["aliases"] = _aliases(names)
    signature["inputs"] = [_tensor(f"INPUT__{at}", each, batching) for at, each in enumerate(inputs)]
    outputs = [nodes[str(name)] for name in program.graph_signature.user_outputs]
    signature["outputs"] = [_tensor(f"OUTPUT__{at}", each, batching) for at, each in enumerate(outputs)]
    return signature, run


def trace(job: Job) -> None:
    """Traces a module to TorchScript; control flow is that of the example."""
    import torch

    module, _ = _made(job)
    with torch.no_grad():
        traced = torch.jit.trace(module, _example(job), check_trace=False)
    torch.jit.save(traced, job.folder / _SCRIPT)


def export(job: Job) -> None:
    """Exports a program whose first dimension is the batch."""
    import torch

    torch.export.save(_exported(job), job.folder / _PROGRAM)


def compile_program(job: Job) -> None:
    """Compiles an exported program for this processor, by AOTInductor."""
    import torch
    from torch import _inductor

    _inductor.aoti_compile_and_package(torch.export.load(job.source), package_path=str(job.folder / _PROGRAM))


def export_onnx(job: Job) -> None:
    """Exports a module to ONNX by way of an exported program."""
    _program_to_onnx(_exported(job), job)


def program_to_onnx(job: Job) -> None:
    """Converts an exported program to ONNX."""
    import torch

    _program_to_onnx(torch.export.load(job.source), job)


def trace_onnx(job: Job) -> None:
    """Exports a module to ONNX by tracing."""
    module, _ = _made(job)
    _trace_to_onnx(module, job)


def script_to_onnx(job: Job) -> None:
    """Converts TorchScript to ONNX."""
    _trace_to_onnx(_script(job), job)


def program_to_openvino(job: Job) -> None:
    """Converts an exported program to OpenVINO, without ONNX between."""
    import torch

    _to_openvino(job, torch.export.load(job.source))


def script_to_openvino(job: Job) -> None:
    """Converts TorchScript to OpenVINO."""
    _to_openvino(job, _script(job), example_input=_example(job))


def _to_openvino(job: Job, model: Any, **more: Any) -> None:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would send usage data
    import openvino

    converted = openvino.convert_model(model, **more)
    for word, tensors in (("INPUT", converted.inputs), ("OUTPUT", converted.outputs)):
        for number, each in enumerate(tensors):
            each.get_tensor().set_names({f"{word}__{number}"})
    openvino.save_model(converted, job.folder / "model.xml", compress_to_fp16=False)


def _made(job: Job) -> tuple[Any, list[Any]]:
    """The module that the user's function returns, and its example inputs, if any."""
    import torch

    sys.path.insert(0, str(job.source.parent))
    spec = importlib.util.spec_from_file_location(job.source.stem, job.source)
    assert spec is not None and spec.loader is not None, job.source
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    function = getattr(loaded, job.options["function"], None)
    if function is None:
        raise ValueError(f"'{job.source}' has no function '{job.options['function']}'")
    made = function()
    module, example = made if isinstance(made, tuple) else (made, ())
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"'{job.options['function']}' must return a torch.nn.Module, or one and a tuple of example "
            f"inputs, not {type(module).__name__}"
        )
    return module.eval(), [example] if isinstance(example, torch.Tensor) else list(example)


def _script(job: Job) -> Any:
    import torch

    return torch.jit.load(job.source, map_location="cpu").eval()


def _arguments(module: Any) -> list[str]:
    import inspect

    return list(inspect.signature(module.forward).parameters)


def _ordered(samples: Arrays, names: list[str]) -> list[np.ndarray[Any, Any]]:
    """The samples in the order of the arguments; the keys are their names or ``INPUT__0`` and so on."""
    numbered = [f"INPUT__{number}" for number in range(len(samples))]
    for keys in (numbered, names[: len(samples)]):
        if set(keys) == set(samples):
            return [samples[key] for key in keys]
    raise ValueError(
        f"--data has the arrays {', '.join(samples)}; expected {', '.join(names)}, the names of the "
        f"arguments, or INPUT__0 and so on"
    )


def _opened(job: Job, module: Any, arrays: list[np.ndarray[Any, Any]], names: list[str]) -> Opened:
    batching = bool(job.options["batching"])
    signature, run = _runner(module, len(arrays), batching)
    signature["aliases"] = _aliases(names[: len(arrays)])
    given = {f"INPUT__{at}": each if batching else each[0] for at, each in enumerate(arrays)}
    signature["inputs"] = [_tensor(name, each, batching) for name, each in given.items()]
    found = run({name: each[:_TRACED_ROWS] for name, each in given.items()} if batching else given)
    signature["outputs"] = [_tensor(name, each, batching) for name, each in found.items()]
    return signature, run


def _runner(module: Any, count: int, batching: bool) -> Opened:
    import torch
    from torch.utils import _pytree

    torch.set_num_threads(1)

    def run(arrays: Arrays) -> Arrays:
        given = [torch.from_numpy(np.ascontiguousarray(arrays[f"INPUT__{at}"])) for at in range(count)]
        with torch.no_grad():
            leaves = _pytree.tree_leaves(module(*given))
        return {f"OUTPUT__{at}": each.numpy() for at, each in enumerate(leaves)}

    return {"batching": batching}, run


def _aliases(names: list[str]) -> dict[str, str]:
    return {name: f"INPUT__{number}" for number, name in enumerate(names)}


def _example(job: Job) -> tuple[Any, ...]:
    """Arguments to trace with: two rows of the samples, or one sample without a batch dimension."""
    import torch

    samples = job.samples()
    arrays = [samples[f"INPUT__{number}"] for number in range(len(samples))]
    return tuple(
        torch.from_numpy(np.ascontiguousarray(each[:_TRACED_ROWS] if job.batch else each[0]))
        for each in arrays
    )


def _exported(job: Job) -> Any:
    import torch

    module, _ = _made(job)
    example = _example(job)
    shapes: Any = None
    if job.batch:
        batch = torch.export.Dim("batch", min=1, max=max(job.batch, _TRACED_ROWS))
        shapes = tuple({0: batch} for _ in example)
        names = _arguments(module)
        if len(names) == 1 and len(example) > 1:  # forward(*inputs)
            shapes = (shapes,)
    with torch.no_grad():
        return torch.export.export(module, example, dynamic_shapes=shapes)


def _program_to_onnx(program: Any, job: Job) -> None:
    import torch

    torch.onnx.export(program, (), job.folder / _ONNX_FILE, dynamo=True, external_data=False, **_names(job))


def _trace_to_onnx(module: Any, job: Job) -> None:
    import torch

    names = _names(job)
    axes = {name: {0: "batch"} for each in names.values() for name in each} if job.batch else None
    file = str(job.folder / _ONNX_FILE)
    torch.onnx.export(module, _example(job), file, dynamo=False, dynamic_axes=axes, **names)


def _names(job: Job) -> dict[str, list[str]]:
    signature = job.signature
    return {f"{word}_names": [each["name"] for each in signature[f"{word}s"]] for word in ("input", "output")}


def _tensor(name: str, value: Any, batching: bool) -> dict[str, Any]:
    datatype = _DATATYPES.get(str(value.dtype).removeprefix("torch."))
    if datatype is None:
        raise ValueError(f"{name} is of {value.dtype}, for which there is no datatype")
    dims = [each if isinstance(each, int) else -1 for each in value.shape]
    return {"name": name, "datatype": datatype, "dims": dims[1:] if batching else dims}
