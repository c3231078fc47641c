"""Serves an MLflow model by ``mlflow.pyfunc``; conch puts this file beside the model's artifact."""

from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import triton_python_backend_utils as pb_utils
from mlflow.types import ParamSchema, Schema

_ARTIFACT = Path(__file__).with_name("artifact")


class TritonPythonModel:
    """Columns become a DataFrame, tensors an array or a dict of arrays, params keyword arguments."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model, and runs it on its example so that the first request finds it warm."""
        self.model = mlflow.pyfunc.load_model(str(_ARTIFACT))
        metadata = self.model.metadata
        self.inputs = metadata.get_input_schema() or Schema([])
        self.outputs = metadata.get_output_schema() or Schema([])
        self.params = {each.name: each for each in metadata.get_params_schema() or ParamSchema([])}
        try:
            example = metadata.load_input_example(str(_ARTIFACT))
            if example is not None:
                self.model.predict(example)
        except Exception as error:  # of the user's model: the example may be of another version of it
            pb_utils.Logger.log_warn(f"the input example of the MLflow model can't be run: {error}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Predicts request by request, as models may look at all rows of one."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        params = {name: _param(given.pop(name), spec) for name, spec in self.params.items() if name in given}
        try:
            predicted = self.model.predict(self._input(given), params=params or None)
            return pb_utils.InferenceResponse(self._tensors(predicted))
        except Exception as error:  # of the user's model: the other requests are served
            return pb_utils.InferenceResponse([], pb_utils.TritonError(f"{type(error).__name__}: {error}"))

    def _input(self, given: dict[str, Any]) -> Any:
        names = _names(self.inputs, "input")
        if self.inputs.is_tensor_spec():
            if not self.inputs.has_input_names():
                return _texts(given[names[0]])
            return {name: _texts(given[name]) for name in names if name in given}
        columns = {
            spec.name if spec.name else number: _column(given[name], spec.type.name)
            for number, (name, spec) in enumerate(zip(names, self.inputs.inputs, strict=False))
            if name in given
        }
        return pd.DataFrame(columns)

    def _tensors(self, predicted: Any) -> list[Any]:
        names = _names(self.outputs, "output")
        if isinstance(predicted, pd.DataFrame):
            by_name = {str(name): predicted[name].to_numpy() for name in predicted.columns}
            arrays = [
                by_name[name] if name in by_name else predicted.iloc[:, n] for n, name in enumerate(names)
            ]
        elif isinstance(predicted, dict):
            arrays = [predicted[name] for name in names]
        elif len(names) == 1:
            arrays = [predicted]
        elif isinstance(predicted, np.ndarray):
            arrays = [predicted[:, number] for number in range(len(names))]
        else:
            arrays = list(predicted)
        specs = zip(names, arrays, self.outputs.inputs, strict=False)
        return [pb_utils.Tensor(name, _array(values, spec)) for name, values, spec in specs]


def _names(schema: Any, usual: str) -> list[str]:
    """Names of tensors, as conch has written them into the config."""
    count = len(schema.inputs)
    return [each.name or (usual if count == 1 else f"{usual}_{n}") for n, each in enumerate(schema.inputs)]


def _texts(array: Any) -> Any:
    if array.dtype.kind != "O":
        return array
    return np.array([each.decode() for each in array.reshape(-1)], object).reshape(array.shape)


def _column(array: Any, kind: str) -> Any:
    array = array.reshape(len(array)) if array.size == len(array) else array
    if kind == "binary":
        return array
    values = _texts(array)
    return values.astype("datetime64[ns]") if kind == "datetime" else values


def _param(array: Any, spec: Any) -> Any:
    values = _texts(array).reshape(-1).tolist()
    if spec.dtype.name == "datetime":
        values = [np.datetime64(each) for each in values]
    return values if spec.shape is not None else values[0]


def _array(values: Any, spec: Any) -> Any:
    kind = spec.type
    name = getattr(kind, "name", None) if not isinstance(kind, np.dtype) else None
    array: Any = np.asarray(values)
    if name in ("string", "datetime", "binary") or (name is None and kind.kind in "OUS"):
        return np.array(
            [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1)], object
        ).reshape(array.shape)
    casting = "unsafe" if array.dtype.kind == "O" else "same_kind"  # no silent loss of fractions
    return array.astype(kind if name is None else kind.to_numpy(), casting=casting)
