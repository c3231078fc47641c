"""The little of the inference protocol that the benchmarks speak themselves."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import numpy.typing as npt

from conch.protocol import inference_pb2 as messages

SERVICE = "/inference.GRPCInferenceService/"


class Probe:
    """Asks a running server for its state; never used while a measurement's load is on."""

    def __init__(self, address: str, key: str = "") -> None:
        # A server is tried again soon after a refused connection: the default backoff starts at a second.
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
        self._channel = grpc.insecure_channel(address, options=options)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, timeout: float, wait: bool = False) -> Any:
        reply = getattr(messages, f"{method}Response")
        stub = self._channel.unary_unary(
            f"{SERVICE}{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        return stub(request, timeout=timeout, wait_for_ready=wait, metadata=self._metadata)

    def ready(self, timeout: float) -> bool:
        """Returns True if the server is ready; waits up to the timeout for it to accept a connection."""
        try:
            reply = self._call("ServerReady", messages.ServerReadyRequest(), timeout, wait=True)
        except grpc.RpcError:
            return False
        return bool(reply.ready)

    def version(self) -> str:
        """The server's name and version as it reports them."""
        reply = self._call("ServerMetadata", messages.ServerMetadataRequest(), 5.0)
        return f"{reply.name} {reply.version}"

    def load(self, model: str) -> None:
        """Loads a model, and returns when it is ready.

        Raises:
            grpc.RpcError: it can't be loaded.
        """
        self._call("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name=model), 120.0)

    def unload(self, model: str) -> None:
        """Takes a model out of service; its requests finish in the background.

        Raises:
            grpc.RpcError: it can't be done.
        """
        self._call("RepositoryModelUnload", messages.RepositoryModelUnloadRequest(model_name=model), 120.0)

    def index(self) -> int:
        """Number of models in the repository index.

        Raises:
            grpc.RpcError: it failed.
        """
        return len(self._index())

    def wait_unloaded(self, model: str, timeout_s: float = 60.0) -> None:
        """Waits until nothing of a model is being unloaded any more.

        Raises:
            TimeoutError: it takes too long.
        """
        end = time.monotonic() + timeout_s
        pause = threading.Event()
        while any(line.name == model and line.state == "UNLOADING" for line in self._index()):
            if time.monotonic() > end:
                raise TimeoutError(f"{model} is still being unloaded")
            pause.wait(0.01)

    def _index(self) -> Any:
        return self._call("RepositoryIndex", messages.RepositoryIndexRequest(), 60.0).models

    def batches(self, model: str) -> tuple[int, int]:
        """Numbers of the model's inferences since the server's start, and of their batches.

        Raises:
            grpc.RpcError: the server has ended or does not have the model.
        """
        reply = self._call("ModelStatistics", messages.ModelStatisticsRequest(name=model), 10.0)
        counts = reply.model_stats[0]
        return int(counts.inference_count), int(counts.execution_count)

    def dimensions(self, model: str) -> int:
        """Number of dimensions of the model's first input.

        Raises:
            grpc.RpcError: the server has ended or does not have the model.
        """
        reply = self._call("ModelMetadata", messages.ModelMetadataRequest(name=model), 10.0)
        return len(reply.inputs[0].shape)

    def infer(self, model: str, values: npt.NDArray[np.float32]) -> float:
        """The first element of OUTPUT0 for an INPUT0; the request says what perf_analyzer's say.

        Raises:
            grpc.RpcError: it failed.
        """
        request = messages.ModelInferRequest(model_name=model, raw_input_contents=[values.tobytes()])
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        request.inputs.add(name="INPUT0", datatype="FP32", shape=values.shape)
        request.outputs.add(name="OUTPUT0")
        reply = self._call("ModelInfer", request, 30.0)
        return float(np.frombuffer(reply.raw_output_contents[0], np.float32)[0])

    def successes(self, model: str) -> int:
        """Number of successful requests for the model since the server's start.

        Raises:
            grpc.RpcError: the server has ended or does not have the model.
        """
        reply = self._call("ModelStatistics", messages.ModelStatisticsRequest(name=model), 10.0)
        return sum(int(entry.inference_stats.success.count) for entry in reply.model_stats)
