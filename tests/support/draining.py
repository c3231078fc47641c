"""Clients of a server that is asked to stop: single calls, and load."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
from tests.support.servers import WAIT_S, RawClient
from tritonclient.grpc import service_pb2

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Answers of the health service."""

_HTTP_BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]})
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_ONE = np.ones(1, np.float32).tobytes()


def request_for(name: str, **parameters: int | bool) -> Any:
    """A request for a model whose input IN is one number."""
    request = service_pb2.ModelInferRequest(model_name=name, raw_input_contents=[_ONE])
    request.inputs.add(name="IN", datatype="FP32", shape=[1])
    for key, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[key].bool_param = value
        else:
            request.parameters[key].int64_param = value
    return request


class Client(RawClient):
    """A client with a connection of its own that says what came of a call in short."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])

    def send(self, name: str, **parameters: int | bool) -> Any:
        """Sends a request; the future has the answer."""
        method = self.channel.unary_unary(
            _INFER, request_serializer=service_pb2.ModelInferRequest.SerializeToString
        )
        return method.future(request_for(name, **parameters), timeout=WAIT_S)

    def health(self) -> Any:
        """Answer of the health service, or the code of an error."""
        try:
            return self.channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code().name

    def probes(self, model: str = "a") -> list[Any]:
        """Live, ready, the model ready; for an error its code and text."""

        def told(ask: Callable[[], bool]) -> Any:
            try:
                return ask()
            except grpc.RpcError as error:
                return error.code().name, error.details()

        return [
            told(lambda: self("ServerLive", service_pb2.ServerLiveRequest()).live),
            told(lambda: self("ServerReady", service_pb2.ServerReadyRequest()).ready),
            told(lambda: self("ModelReady", service_pb2.ModelReadyRequest(name=model)).ready),
        ]


def outcome(future: Any) -> str:
    """End of a request: ``OK``, or the code of its error."""
    error = future.exception(WAIT_S)
    return "OK" if error is None else str(error.code().name)


class Load:
    """Clients that send one request after the other, half of them over streams, and count what comes of it.

    Args:
        address: The server's.
        model: The model's name.
        polite: True if they send no more once the health service says that the server is not ready.
        http_address: HTTP address of two more clients, one of them each time on a new connection; None
            for no such clients.
        notice_s: Seconds in which polite clients go on after that, as before their load balancer has noticed.
    """

    def __init__(
        self, address: str, model: str, polite: bool, http_address: str | None = None, notice_s: float = 0.0
    ) -> None:
        self._address = address
        self._http_address = http_address
        self._notice_s = notice_s
        self._model = model
        self._lock = threading.Lock()
        self.completed = 0
        self.failures: list[tuple[str, str]] = []
        self.enough = threading.Event()
        work = [self._unary, self._unary, self._stream, self._stream]
        if http_address is not None:
            work += [self._http, self._http_anew]
        self._threads = [
            threading.Thread(target=each) for each in (*work, *([self._watch] if polite else []))
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until all of them have ended."""
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _count(self) -> None:
        with self._lock:
            self.completed += 1

    def _unary(self) -> None:
        with closing(Client(self._address)) as client:
            while not self.enough.is_set():
                error = client.send(self._model).exception(WAIT_S)
                if error is not None:
                    self.failures.append((error.code().name, error.details()))
                    return
                self._count()

    def _http(self, anew: bool = False) -> None:
        assert self._http_address is not None
        with closing(http.client.HTTPConnection(self._http_address, timeout=WAIT_S)) as connection:
            while not self.enough.is_set():
                try:
                    connection.request("POST", f"/v2/models/{self._model}/infer", _HTTP_BODY)
                    response = connection.getresponse()
                    body = response.read()
                except (OSError, http.client.HTTPException) as error:
                    self.failures.append((type(error).__name__, str(error)))
                    return
                if response.status != http.HTTPStatus.OK:
                    self.failures.append((str(response.status), body.decode()))
                    return
                self._count()
                if anew:
                    connection.close()

    def _http_anew(self) -> None:
        self._http(anew=True)

    def _stream(self) -> None:
        answers: queue.Queue[None] = queue.Queue()

        def requests() -> Iterator[Any]:
            yield request_for(self._model)
            yield request_for(self._model)  # so that there always is one in flight
            while not self.enough.is_set():
                answers.get(timeout=WAIT_S)
                yield request_for(self._model)

        with closing(Client(self._address)) as client:
            try:
                # A deadline would be one for the whole load; `answers` bounds the wait for each response.
                for response in client.stream(requests(), timeout_s=None):
                    assert not response.error_message, response.error_message
                    self._count()
                    answers.put(None)
            except grpc.RpcError as error:
                self.failures.append((error.code().name, error.details()))
                answers.put(None)
                self.enough.set()

    def _watch(self) -> None:
        with closing(Client(self._address)) as client:
            while not self.enough.is_set():
                if client.health() != SERVING:
                    self.enough.wait(self._notice_s)
                    self.enough.set()
                self.enough.wait(0.01)
