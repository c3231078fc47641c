"""The limit: a gRPC server on grpcio's C core that only echoes.

It answers what perf_analyzer asks for and sends every input tensor back, with no queue, no scheduler and no
model, from one thread. What a server in Python on the same transport could reach at best for small requests
is what this one reaches. For large tensors it is no limit: it parses and serialises whole messages, which
copies them more often than a careful server does.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

# The limit is that of conch's front end, so it reads sockets the same way; see its adapter.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

from grpc._cython import cygrpc

from bench.protocol import SERVICE
from conch.protocol import inference_pb2 as messages

NO_FLAGS = 0
# Calls asked for ahead of time, so that a burst of new calls finds them waiting.
CALLS_AHEAD = 128


class Echo:
    """The answers; bytes in, bytes out."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._nanoseconds: dict[str, int] = {}
        self.unary: dict[str, Callable[[bytes], bytes]] = {
            f"{SERVICE}ServerLive": lambda _: messages.ServerLiveResponse(live=True).SerializeToString(),
            f"{SERVICE}ServerReady": lambda _: messages.ServerReadyResponse(ready=True).SerializeToString(),
            f"{SERVICE}ModelReady": lambda _: messages.ModelReadyResponse(ready=True).SerializeToString(),
            f"{SERVICE}ServerMetadata": self._server_metadata,
            f"{SERVICE}ModelMetadata": self._model_metadata,
            f"{SERVICE}ModelConfig": self._model_config,
            f"{SERVICE}ModelStatistics": self._model_statistics,
            f"{SERVICE}ModelInfer": lambda data: self.infer(data).SerializeToString(),
        }

    def infer(self, data: bytes) -> Any:
        """Turn an inference request into the response that carries its tensors back."""
        start = time.perf_counter_ns()
        request = messages.ModelInferRequest.FromString(data)
        name = request.model_name
        response = messages.ModelInferResponse(model_name=name, model_version="1", id=request.id)
        for number, tensor in enumerate(request.inputs):
            response.outputs.add(name=f"OUTPUT{number}", datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.extend(request.raw_input_contents)
        self._counts[name] = self._counts.get(name, 0) + 1
        self._nanoseconds[name] = self._nanoseconds.get(name, 0) + time.perf_counter_ns() - start
        return response

    def stream_infer(self, data: bytes) -> bytes:
        """The same for one message of a stream."""
        return messages.ModelStreamInferResponse(infer_response=self.infer(data)).SerializeToString()

    def _server_metadata(self, _: bytes) -> bytes:
        reply = messages.ServerMetadataResponse(name="echo_limit", version="1", extensions=["statistics"])
        return reply.SerializeToString()

    def _model_metadata(self, data: bytes) -> bytes:
        name = messages.ModelMetadataRequest.FromString(data).name
        reply = messages.ModelMetadataResponse(name=name, versions=["1"], platform="echo")
        reply.inputs.add(name="INPUT0", datatype="FP32", shape=[-1, -1])
        reply.outputs.add(name="OUTPUT0", datatype="FP32", shape=[-1, -1])
        return reply.SerializeToString()

    def _model_config(self, data: bytes) -> bytes:
        reply = messages.ModelConfigResponse()
        config = reply.config
        config.name = messages.ModelConfigRequest.FromString(data).name
        config.max_batch_size = 64
        type_fp32 = 11  # inference.DataType.TYPE_FP32
        config.input.add(name="INPUT0", data_type=type_fp32, dims=[-1])
        config.output.add(name="OUTPUT0", data_type=type_fp32, dims=[-1])
        return reply.SerializeToString()

    def _model_statistics(self, data: bytes) -> bytes:
        name = messages.ModelStatisticsRequest.FromString(data).name
        count, spent = self._counts.get(name, 0), self._nanoseconds.get(name, 0)
        reply = messages.ModelStatisticsResponse()
        entry = reply.model_stats.add(name=name, version="1", inference_count=count, execution_count=count)
        for part, ns in (("success", spent), ("compute_infer", spent), ("queue", 0)):
            duration = getattr(entry.inference_stats, part)
            duration.count, duration.ns = count, ns
        for part in ("compute_input", "compute_output"):
            getattr(entry.inference_stats, part).count = count
        return reply.SerializeToString()


class Stream:
    """One ModelStreamInfer call: one read and one write outstanding, answers sent in order."""

    def __init__(self, call: Any, answer: Callable[[bytes], bytes]) -> None:
        self._call = call
        self._answer = answer
        self._waiting: deque[bytes] = deque()
        self._writing = True
        self._half_closed = False
        call.start_server_batch((cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),), self._sent)
        self._read()

    def _read(self) -> None:
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(NO_FLAGS),), self._received)

    def _received(self, event: Any) -> None:
        data = event.batch_operations[0].message()
        if data is None:
            self._half_closed = True
        else:
            self._waiting.append(self._answer(data))
            self._read()
        if not self._writing:
            self._write()

    def _sent(self, _: Any) -> None:
        self._writing = False
        self._write()

    def _write(self) -> None:
        if self._waiting:
            self._writing = True
            message = cygrpc.SendMessageOperation(self._waiting.popleft(), NO_FLAGS)
            self._call.start_server_batch((message,), self._sent)
        elif self._half_closed:
            self._writing = True
            self._call.start_server_batch(_last_operations(cygrpc.StatusCode.ok, b""), _ignore)


class Loop:
    """One completion queue, one thread; a tag is the function that takes its event."""

    def __init__(self, port: int, echo: Echo) -> None:
        self._echo = echo
        self._queue = cygrpc.CompletionQueue()
        arguments = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
        self._server = cygrpc.Server(arguments, False)
        self._server.register_completion_queue(self._queue)
        if not self._server.add_http2_port(f"127.0.0.1:{port}".encode()):
            raise SystemExit(f"echo_limit: port {port} is taken")
        self._server.start()
        for _ in range(CALLS_AHEAD):
            self._request_call()

    def run(self) -> None:
        """Serve for ever."""
        poll = self._queue.poll
        while True:
            event = poll()
            event.tag(event)

    def _request_call(self) -> None:
        self._server.request_call(self._queue, self._queue, self._called)

    def _called(self, event: Any) -> None:
        self._request_call()
        if not event.success:
            return
        call = event.call
        method = event.call_details.method.decode()
        handler = self._echo.unary.get(method)
        if handler is not None:
            receive = (cygrpc.ReceiveMessageOperation(NO_FLAGS),)
            call.start_server_batch(receive, lambda received: _answer_unary(call, handler, received))
        elif method == f"{SERVICE}ModelStreamInfer":
            Stream(call, self._echo.stream_infer)
        else:
            status = _last_operations(cygrpc.StatusCode.unimplemented, b"echo_limit only echoes")
            call.start_server_batch((cygrpc.SendInitialMetadataOperation(None, NO_FLAGS), *status), _ignore)


def _answer_unary(call: Any, handler: Callable[[bytes], bytes], event: Any) -> None:
    data = event.batch_operations[0].message()
    if data is None:  # cancelled before its message arrived
        call.start_server_batch(_last_operations(cygrpc.StatusCode.cancelled, b""), _ignore)
        return
    operations = (
        cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
        cygrpc.SendMessageOperation(handler(data), NO_FLAGS),
        *_last_operations(cygrpc.StatusCode.ok, b""),
    )
    call.start_server_batch(operations, _ignore)


def _last_operations(code: Any, details: bytes) -> tuple[Any, ...]:
    # Waiting for the close in the same batch saves an event per call.
    return (
        cygrpc.SendStatusFromServerOperation(None, code, details, NO_FLAGS),
        cygrpc.ReceiveCloseOnServerOperation(NO_FLAGS),
    )


def _ignore(_: Any) -> None:
    """Take an event that nothing depends on."""


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="A bare gRPC echo server on grpcio's C core.")
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # The queue's thread is a daemon: its poll cannot be interrupted, and nothing is lost with it.
    threading.Thread(target=Loop(port, Echo()).run, daemon=True).start()
    stop.wait()


if __name__ == "__main__":
    main()
