"""Asks a server about a model, over either protocol."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.json_format import MessageToDict

from conch.protocol import inference_pb2
from conch_tools.connection import Endpoint

_TIMEOUT_S = 30.0
_CONNECT_S = 5.0
_REGIONS = "/v2/systemsharedmemory"
# grpcio does not tell otherwise whether UNAVAILABLE comes from a server or from its channel.
_NOT_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed", "empty address list")
# grpcio's texts of a port that speaks HTTP/1.1, without and with TLS.
_IS_HTTP = ("Trying to connect an http1.x server", "missing selected ALPN property")
_SERVICE = "/inference.GRPCInferenceService/"


class AskError(Exception):
    """The server refuses, or does not answer.

    Attributes:
        reached: True if there is a server.
    """

    def __init__(self, message: str, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


def open_channel(endpoint: Endpoint) -> grpc.Channel:
    """A gRPC channel for messages of any size."""
    target = f"unix:{endpoint.path}" if endpoint.path else endpoint.authority
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
    ]
    tls = endpoint.tls
    if tls is None:
        return grpc.insecure_channel(target, options)
    files = [
        None if file is None else file.read_bytes()
        for file in (tls.root_cert, tls.client_key, tls.client_cert)
    ]
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(*files), options)


def ask_error(endpoint: Endpoint, error: grpc.RpcError) -> AskError:
    """The error of a call that failed."""
    text = error.details() or error.code().name
    reached = error.code() is not grpc.StatusCode.UNAVAILABLE or not text.startswith(_NOT_CONNECTED)
    if not reached and any(each in text for each in _IS_HTTP):
        other = replace(endpoint, protocol="http").url
        return AskError(
            f"{endpoint.url} is an HTTP port: use {other} (-i http of perf_analyzer), or the gRPC port", False
        )
    return AskError(text if reached else f"{endpoint.url}: {text}", reached)


class ServerApi:
    """A server's answers as plain objects, the same over gRPC and HTTP."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def check(self) -> None:
        """Raises AskError: there is no server, or its certificate is wrong."""
        try:
            self._endpoint.connect(_CONNECT_S).close()
        except OSError as error:
            raise AskError(
                f"can't connect to {self._endpoint.url}: {error.strerror or error}", False
            ) from None

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Name, versions, platform, inputs and outputs of a model. Raises AskError."""
        if self._endpoint.protocol == "http":
            return self._get(model_path(model, version))
        request = inference_pb2.ModelMetadataRequest(name=model, version=version)
        return self._call("ModelMetadata", request, inference_pb2.ModelMetadataResponse)

    def config(self, model: str, version: str) -> dict[str, Any]:
        """The model's config. Raises AskError."""
        if self._endpoint.protocol == "http":
            return self._get(f"{model_path(model, version)}/config")
        request = inference_pb2.ModelConfigRequest(name=model, version=version)
        found = self._call("ModelConfig", request, inference_pb2.ModelConfigResponse)
        config = found["config"]
        assert isinstance(config, dict), "a message"
        return config

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """The statistics of a model's versions. Raises AskError."""
        if self._endpoint.protocol == "http":
            found = self._get(f"{model_path(model, version)}/stats")
        else:
            request = inference_pb2.ModelStatisticsRequest(name=model, version=version)
            found = self._call("ModelStatistics", request, inference_pb2.ModelStatisticsResponse)
        return list(found.get("model_stats", ()))

    def call(self, method: str, request: Any, answer: Any) -> dict[str, Any]:
        """The answer to any method of gRPC's service. Raises AskError."""
        return self._call(method, request, answer)

    def register_system_region(self, name: str, key: str, size: int) -> None:
        """Registers a whole object of system shared memory. Raises AskError."""
        if self._endpoint.protocol == "http":
            self._ask(
                "POST", f"{_REGIONS}/region/{name}/register", {"key": key, "offset": 0, "byte_size": size}
            )
            return
        request = inference_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size)
        self._call("SystemSharedMemoryRegister", request, inference_pb2.SystemSharedMemoryRegisterResponse)

    def unregister_system_region(self, name: str) -> None:
        """Unregisters a region. Raises AskError."""
        if self._endpoint.protocol == "http":
            self._ask("POST", f"{_REGIONS}/region/{name}/unregister", {})
            return
        request = inference_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        answer = inference_pb2.SystemSharedMemoryUnregisterResponse
        self._call("SystemSharedMemoryUnregister", request, answer)

    def _call(self, method: str, request: Any, answer: Any) -> dict[str, Any]:
        endpoint = self._endpoint
        try:
            with open_channel(endpoint) as channel:
                send = channel.unary_unary(
                    f"{_SERVICE}{method}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=answer.FromString,
                )
                found = send(request, timeout=_TIMEOUT_S, metadata=tuple(endpoint.headers.items()))
        except grpc.RpcError as error:
            raise ask_error(endpoint, error) from None
        return MessageToDict(
            found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    def _get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, sent: Mapping[str, Any] | None) -> dict[str, Any]:
        content = None if sent is None else json.dumps(sent)
        status, body = http_ask(self._endpoint, method, path, content, _TIMEOUT_S)
        try:
            found = json.loads(body or "{}")
        except ValueError:
            found = {}
        if status != http.HTTPStatus.OK or not isinstance(found, dict):
            text = found.get("error") if isinstance(found, dict) else None
            raise AskError(str(text or f"HTTP {status}"), True)
        return found


def http_get(endpoint: Endpoint, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of an answer; AskError if there is no server."""
    return http_ask(endpoint, "GET", path, None, timeout_s)


def http_ask(
    endpoint: Endpoint, method: str, path: str, content: str | None, timeout_s: float
) -> tuple[int, bytes]:
    """As `http_get`, with any method and content."""
    try:
        with closing(http.client.HTTPConnection(endpoint.host, endpoint.port)) as connection:
            connection.sock = endpoint.connect(timeout_s)
            connection.request(method, path, content, dict(endpoint.headers))
            response = connection.getresponse()
            return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        text = f"{endpoint.url}: {str(error) or type(error).__name__}"
        if type(error) is http.client.BadStatusLine:
            other = replace(endpoint, protocol="grpc").url
            text = (
                f"{endpoint.url} is no HTTP port: use the HTTP port, or {other} (-i grpc of perf_analyzer) "
                "if it speaks gRPC"
            )
        raise AskError(text, False) from None


def model_path(model: str, version: str) -> str:
    """The path of a model over HTTP."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{version}" if version else path
