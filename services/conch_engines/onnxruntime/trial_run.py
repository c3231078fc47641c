"""Runs a model on zeros where its file leaves open what it answers.

The file of a model has names for variable dims, and its shapes may be wrong: CatBoost declares ``[N]`` for
what is ``[N,1]``. A trial has at most `MOST_S` and inputs of `_MOST_ELEMENTS`; one that fails tells nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from conch.backends.signature import ModelTensor, Signature
from conch.core.errors import ConchError
from conch.core.tensor import NUMPY_DTYPES, Array
from conch.core.validation import shape_text
from conch_engines.onnxruntime.session_function import native

log = logging.getLogger(__name__)

_ROWS, _OTHER = 3, 2
"""Sizes of variable dims: of the first one, and of others."""

MOST_S = 10.0
"""Longest trial in seconds."""

_MOST_ELEMENTS = 1 << 22
_SILENT = 4  # log severity of ONNX Runtime


def settled(
    ort: Any, session: Any, signature: Signature, model: str, open_session: Callable[[], Any], batches: bool
) -> Signature:
    """The signature from which a config is completed.

    Args:
        ort: The `onnxruntime` package.
        session: A session of the model, which need not be able to run.
        signature: Its inputs and outputs as the file declares them.
        model: The model's name.
        open_session: Makes a session that can run. Raises ConchError: there can't be one.
        batches: True if the config says that the model batches.
    """
    told = native(session)
    shapes = [each.shape for each in (*told.inputs_meta, *told.outputs_meta) if each.shape]
    names = {shape[0] for shape in shapes if isinstance(shape[0], str)}
    if signature.supports_batching and any(names.intersection(shape[1:]) for shape in shapes):
        log.info("model '%s' does not batch: its batch dimension is not the first one alone", model)
        return replace(signature, batches=False)
    doubtful = signature.supports_batching and len(names) > 1
    if not doubtful and all(each.dims is not None and len(each.dims) != 1 for each in signature.outputs):
        return signature
    found = tried(ort, session, signature, model, open_session)
    if found is None and doubtful and not batches:
        log.info(
            "model '%s' may not batch: the first dims of its inputs and outputs have different names (%s), "
            "and a run on zeros does not tell; set max_batch_size in the config if it batches",
            model,
            ", ".join(sorted(names)),
        )
        return replace(signature, batches=False)
    return found or signature


def tried(
    ort: Any, session: Any, signature: Signature, model: str, open_session: Callable[[], Any]
) -> Signature | None:
    """The signature with dims and batching as one run on zeros shows them; None if there can't be one."""
    shapes = [each.shape or () for each in native(session).inputs_meta]
    if any(each.dims is None for each in signature.inputs):
        return None
    try:
        running = open_session()
    except ConchError:
        return None
    # First with a size for each name. Inputs that take this are independent, so that they have no batch.
    for apart in (True, False):
        inputs = _zeros(signature.inputs, shapes, apart)
        results = None if inputs is None else _run(ort, running, inputs)
        if inputs is not None and results is not None:
            break
    else:
        return None
    rows = {inputs[each.name].shape[:1] for each in signature.inputs}
    shapes = [np.shape(each) if isinstance(each, np.ndarray) else (len(each), _OTHER) for each in results]
    outputs = tuple(_corrected(*each, model) for each in zip(signature.outputs, shapes, strict=True))
    found = replace(signature, outputs=outputs)
    keeps_rows = len(rows) == 1 and all(shape[:1] in rows for shape in shapes)
    return replace(found, batches=found.supports_batching and keeps_rows)


def _zeros(tensors: tuple[ModelTensor, ...], shapes: list[Any], apart: bool) -> dict[str, Array] | None:
    sizes: dict[object, int] = {}

    def size(dim: object, place: int) -> int:
        if isinstance(dim, int) and dim >= 0:
            return dim
        if apart and dim:
            return sizes.setdefault(dim, _ROWS + len(sizes))
        return _OTHER if place else _ROWS

    inputs = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        made = [size(dim, place) for place, dim in enumerate(shape)]
        dtype = NUMPY_DTYPES.get(tensor.datatype)
        if dtype is None or prod(made) > _MOST_ELEMENTS:
            return None
        inputs[tensor.name] = np.full(made, "" if dtype.hasobject else 0, dtype)
    return inputs


def _run(ort: Any, session: Any, inputs: dict[str, Array]) -> list[Any] | None:
    options = ort.RunOptions()
    options.log_severity_level = _SILENT
    timer = threading.Timer(MOST_S, setattr, (options, "terminate", True))
    timer.start()
    try:
        results: list[Any] = session.run(None, inputs, options)
    except Exception:  # of the engine: zeros suit not every model
        log.debug("a run on zeros failed", exc_info=True)
        return None
    finally:
        timer.cancel()
        timer.join()
    return results


def _corrected(tensor: ModelTensor, shape: tuple[int, ...], model: str) -> ModelTensor:
    """An output with the number of dims that it really has; those above 1 may vary."""
    if tensor.dims is not None and len(tensor.dims) == len(shape):
        return tensor
    dims = tuple(1 if size == 1 else -1 for size in shape)
    log.info(
        "model '%s' answers with %s for output '%s' in a run on zeros, where its file declares %s",
        model,
        shape_text(dims),
        tensor.name,
        "any number of dims" if tensor.dims is None else shape_text(tensor.dims),
    )
    return replace(tensor, dims=dims)
