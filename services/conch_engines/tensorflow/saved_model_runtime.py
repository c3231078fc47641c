"""Runs a SavedModel or GraphDef of TensorFlow as a Python model, mostly in a worker.

Imports nothing of conch, as the model may have an environment of its own. SavedModels are loaded through the
interface of TensorFlow 1, which also reads those that old versions of Keras wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its start writes a page

import tensorflow as tf
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance: a session and a callable of all outputs."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the graph into a session of its own."""
        config = json.loads(args["model_config"])
        parameters = {
            key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()
        }
        self._batches = int(config.get("max_batch_size", 0)) > 0
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._outputs = [tensor["name"] for tensor in config["output"]]
        self._dims = [
            tensor["reshape"].get("shape", []) if "reshape" in tensor else tensor["dims"]
            for tensor in config["output"]
        ]
        root = Path(args["model_repository"])
        folder = root / args["model_version"]
        name = config.get("default_model_filename", "")
        graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=graph, config=_session_config(config, parameters))
        with graph.as_default():
            if config.get("platform") == "tensorflow_graphdef":
                feeds, fetches = self._load_graph(graph, folder / (name or "model.graphdef"))
            else:
                feeds, fetches = self._load_saved(folder / (name or "model.savedmodel"), parameters)
            fed = [graph.get_tensor_by_name(feed) for feed in feeds]
            self._types = [tensor.dtype.as_numpy_dtype for tensor in fed]
            self._scalars = [tensor.shape.rank == 0 for tensor in fed]
            self._run_init_ops(parameters, (folder, root))
        self._call = self._session.make_callable(fetches, feed_list=feeds)

    def _load_saved(self, path: Path, parameters: dict[str, str]) -> tuple[list[str], list[str]]:
        """Loads a SavedModel; returns the graph's names of inputs and outputs."""
        tags = [parameters.get("TF_GRAPH_TAG", "serve")]
        loaded = tf.compat.v1.saved_model.load(self._session, tags, str(path))
        signature = loaded.signature_def[parameters.get("TF_SIGNATURE_DEF", "serving_default")]
        return (
            [signature.inputs[name].name for name in self._inputs],
            [signature.outputs[name].name for name in self._outputs],
        )

    def _load_graph(self, graph: Any, path: Path) -> tuple[list[str], list[str]]:
        """Loads a GraphDef, whose nodes are named as the config's tensors."""
        definition = tf.compat.v1.GraphDef()
        definition.ParseFromString(path.read_bytes())
        tf.import_graph_def(definition, name="")
        nodes = {operation.name for operation in graph.get_operations()}
        for kind, names in (("input", self._inputs), ("output", self._outputs)):
            for name in names:
                if name not in nodes:
                    raise ValueError(f"unexpected inference {kind} '{name}': the graph has no such node")
        return [f"{name}:0" for name in self._inputs], [f"{name}:0" for name in self._outputs]

    def _run_init_ops(self, parameters: dict[str, str], folders: Sequence[Path]) -> None:
        name = parameters.get("TF_INIT_OPS_FILE")
        if name is None:
            return
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"unable to find '{name}', which parameter 'TF_INIT_OPS_FILE' names")
        for operation in json.loads(path.read_text())["init_ops"]:
            self._session.run(operation)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Runs the requests as one batch if the model batches."""
        if self._batches:
            return self._run(requests)
        return [self._run([request])[0] for request in requests]

    def _run(self, requests: Sequence[Any]) -> list[Any]:
        arrays = [[_array(request, name) for request in requests] for name in self._inputs]
        joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in arrays]
        feeds = [array.astype(kind, copy=False) for array, kind in zip(joined, self._types, strict=True)]
        if not self._batches:  # dims of 1 of a config stand for a scalar
            scalars = zip(feeds, self._scalars, strict=True)
            feeds = [array.reshape(()) if scalar else array for array, scalar in scalars]
        try:
            results = [_plain(value) for value in self._call(*feeds)]
        except Exception as error:  # of the engine
            failed = pb_utils.TritonError(str(error))
            return [pb_utils.InferenceResponse(error=failed) for _ in requests]
        if not self._batches:
            results = [_sized(value, dims) for value, dims in zip(results, self._dims, strict=True)]
        if len(requests) == 1:
            return [self._response(results)]
        ends = np.cumsum([part.shape[0] for part in arrays[0]])[:-1]
        split = [np.split(value, ends) for value in results]
        return [self._response(values) for values in zip(*split, strict=True)]

    def _response(self, values: Sequence[Any]) -> Any:
        named = zip(self._outputs, values, strict=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in named])

    def finalize(self) -> None:
        """Closes the session."""
        self._session.close()


def _array(request: Any, name: str) -> Any:
    tensor: Any = pb_utils.get_input_tensor_by_name(request, name)
    return tensor.as_numpy()


def _plain(value: Any) -> Any:
    """An output as an array of a dtype that numpy itself has."""
    array = np.asarray(value, object if isinstance(value, bytes) else None)  # a scalar of strings
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _sized(array: Any, dims: Sequence[int]) -> Any:
    """A scalar with the dims of the config, which can't be empty."""
    return array.reshape(dims) if array.ndim == 0 and set(dims) == {1} else array


def _session_config(config: dict[str, Any], parameters: dict[str, str]) -> Any:
    """The session's settings from parameters and ``optimization``."""
    settings = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    settings.gpu_options.allow_growth = True
    cores = len(os.sched_getaffinity(0))
    # All instances together use each core once, unless the config says otherwise.
    instances = sum(int(group.get("count", 1)) for group in config.get("instance_group", [])) or 1
    settings.intra_op_parallelism_threads = int(parameters.get("TF_NUM_INTRA_THREADS", "0")) or max(
        cores // instances, 1
    )
    settings.inter_op_parallelism_threads = int(parameters.get("TF_NUM_INTER_THREADS", "0")) or 1
    shared = parameters.get("TF_USE_PER_SESSION_THREADS", "").lower() in {"true", "on", "1"}
    settings.use_per_session_threads = shared
    optimization = config.get("optimization", {})
    level = int(optimization.get("graph", {}).get("level", 0))
    if level > 0:  # XLA
        jit = tf.compat.v1.OptimizerOptions
        settings.graph_options.optimizer_options.global_jit_level = jit.ON_2 if level > 1 else jit.ON_1
    accelerators = optimization.get("execution_accelerators", {}).get("gpu_execution_accelerator", [])
    if any(each.get("name") == "auto_mixed_precision" for each in accelerators):
        settings.graph_options.rewrite_options.auto_mixed_precision = 1
    return settings
