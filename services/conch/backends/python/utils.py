"""The API models import as `triton_python_backend_utils`."""

from __future__ import annotations

import sys

from conch.backends.python.config import ModelConfig
from conch.backends.python.errors import TritonError, TritonModelException
from conch.backends.python.loading import directory_of
from conch.backends.python.logger import Logger, LogLevel
from conch.backends.python.metrics import MetricFamily
from conch.backends.python.models import is_model_ready, load_model, unload_model
from conch.backends.python.request import (
    InferenceRequest,
    InferenceTrace,
    get_input_tensor_by_name,
    get_output_tensor_by_name,
)
from conch.backends.python.response import InferenceResponse
from conch.backends.python.responses import ResponseIterator
from conch.backends.python.sender import ResponseSender
from conch.backends.python.tensor import Tensor
from conch.backends.python.types import (
    TRITON_STRING_TO_NUMPY,
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    MemoryType,
    PreferredMemory,
    deserialize_bytes_tensor,
    get_input_config_by_name,
    get_output_config_by_name,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
    using_decoupled_model_transaction_policy,
)

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "MemoryType",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


def get_model_dir() -> str:
    """The version directory of the model that calls.

    Raises:
        TritonModelException: No model is among the callers.
    """
    # All models share one process, so the answer is in the caller's module, on whatever thread it runs.
    frame = sys._getframe(1)
    while frame is not None:
        directory = directory_of(frame.f_globals.get("__name__", ""))
        if directory is not None:
            return str(directory)
        frame = frame.f_back  # type: ignore[assignment]
    raise TritonModelException("get_model_dir must be called from a model.")
