"""Exports the names that models import as `triton_python_backend_utils`.

Used by: `c_python_backend_utils`, `triton_python_backend_utils`.
"""

from __future__ import annotations

import sys

from conch.backends.python.api.pb_errors import TritonError, TritonModelException
from conch.backends.python.api.pb_logger import Logger, LogLevel
from conch.backends.python.api.pb_metrics import MetricFamily
from conch.backends.python.api.pb_model_config import ModelConfig
from conch.backends.python.api.pb_model_control import is_model_ready, load_model, unload_model
from conch.backends.python.api.pb_request import (
    InferenceRequest,
    InferenceTrace,
    get_input_tensor_by_name,
    get_output_tensor_by_name,
)
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.api.pb_types import (
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
from conch.backends.python.api.response_sender import ResponseSender
from conch.backends.python.calls.response_iterator import ResponseIterator
from conch.backends.python.runtime.module_loading import directory_of

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
    """The version directory of the calling model.

    Raises:
        TritonModelException: The caller is not a model.
    """
    # Models share a process, so the innermost model module on the stack decides.
    frame = sys._getframe(1)
    while frame is not None:
        directory = directory_of(frame.f_globals.get("__name__", ""))
        if directory is not None:
            return str(directory)
        frame = frame.f_back  # type: ignore[assignment]
    raise TritonModelException("get_model_dir must be called from a model.")
