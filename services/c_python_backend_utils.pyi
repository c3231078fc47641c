"""Types of Triton's extension module: those of `triton_python_backend_utils`."""

from triton_python_backend_utils import TRITONSERVER_MEMORY_CPU as TRITONSERVER_MEMORY_CPU
from triton_python_backend_utils import TRITONSERVER_MEMORY_GPU as TRITONSERVER_MEMORY_GPU
from triton_python_backend_utils import InferenceRequest as InferenceRequest
from triton_python_backend_utils import InferenceResponse as InferenceResponse
from triton_python_backend_utils import InferenceTrace as InferenceTrace
from triton_python_backend_utils import Logger as Logger
from triton_python_backend_utils import MemoryType as MemoryType
from triton_python_backend_utils import MetricFamily as MetricFamily
from triton_python_backend_utils import PreferredMemory as PreferredMemory
from triton_python_backend_utils import ResponseIterator as ResponseIterator
from triton_python_backend_utils import ResponseSender as InferenceResponseSender
from triton_python_backend_utils import Tensor as Tensor
from triton_python_backend_utils import TritonError as TritonError
from triton_python_backend_utils import TritonModelException as TritonModelException
from triton_python_backend_utils import _Metric as Metric
from triton_python_backend_utils import is_model_ready as is_model_ready
from triton_python_backend_utils import load_model as load_model
from triton_python_backend_utils import unload_model as unload_model

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

COUNTER: int
GAUGE: int
HISTOGRAM: int
