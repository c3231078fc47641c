"""The name of Triton's extension module, from which some models import parts of the API."""

from conch.backends.python.api.pb_metrics import Metric, MetricFamily
from conch.backends.python.api.pb_utils import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    Logger,
    MemoryType,
    PreferredMemory,
    ResponseIterator,
    Tensor,
    TritonError,
    TritonModelException,
    is_model_ready,
    load_model,
    unload_model,
)
from conch.backends.python.api.response_sender import ResponseSender as InferenceResponseSender

COUNTER = MetricFamily.COUNTER
GAUGE = MetricFamily.GAUGE
HISTOGRAM = MetricFamily.HISTOGRAM

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "unload_model",
]
