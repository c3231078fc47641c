"""Adapts the table of operations to gRPC: parses requests, asks the door, sends results.

Threads and locks: messages are parsed and made on the thread of the operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError, Message

from conch.access.access_guard import AccessGuard
from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from conch.core.tensor import Buffer
from conch.door import operation_table as table
from conch.door.door import Door
from conch.door.operation_table import Operation
from conch.frontends import result_objects as results
from conch.frontends.grpc import operation_messages as messages
from conch.frontends.grpc.rpc_calls import UnaryMethod, UnaryRpc
from conch.protocol import health_pb2
from conch.protocol import inference_pb2 as pb

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024
"""Largest request of RPCs that carry names and settings."""


@dataclass(frozen=True, slots=True)
class _Rpc:
    """The messages of one operation; `read` makes the plain request, `write` the response message."""

    operation: Operation[Any, Any]
    message_class: Any
    read: Callable[[Any, UnaryRpc], Any]
    write: Callable[[Any], Any]
    max_bytes: int | None = MAX_REQUEST_BYTES


def operation_handlers(door: Door, guard: AccessGuard) -> dict[str, UnaryMethod]:
    """Returns the handlers of all operations that have an RPC, by gRPC method."""
    return {rpc.operation.grpc_method: _handler(rpc, door, guard) for rpc in _rpcs(guard)}


def _made(kind: type[Message], convert: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Message]:
    """Makes messages of a kind by the JSON of results."""
    return lambda result: kind(**convert(result))


def _rpcs(guard: AccessGuard) -> tuple[_Rpc, ...]:
    return (
        _Rpc(table.SERVER_LIVE, pb.ServerLiveRequest, _nothing, messages.write_live),
        _Rpc(
            table.SERVER_READY,
            pb.ServerReadyRequest,
            _nothing,
            lambda ready: pb.ServerReadyResponse(ready=ready),
        ),
        _Rpc(
            table.MODEL_READY,
            pb.ModelReadyRequest,
            messages.read_model,
            lambda ready: pb.ModelReadyResponse(ready=ready),
        ),
        _Rpc(table.HEALTH_CHECK, health_pb2.HealthCheckRequest, messages.read_service, messages.write_health),
        _Rpc(
            table.SERVER_METADATA,
            pb.ServerMetadataRequest,
            _nothing,
            _made(pb.ServerMetadataResponse, results.server_object),
        ),
        _Rpc(
            table.MODEL_METADATA,
            pb.ModelMetadataRequest,
            messages.read_model,
            _made(pb.ModelMetadataResponse, results.metadata_object),
        ),
        _Rpc(table.MODEL_CONFIG, pb.ModelConfigRequest, messages.read_model, messages.write_model_config),
        _Rpc(
            table.MODEL_STATISTICS, pb.ModelStatisticsRequest, messages.read_model, messages.write_statistics
        ),
        _Rpc(table.REPOSITORY_INDEX, pb.RepositoryIndexRequest, messages.read_index, messages.write_index),
        # The parameters hold files, so the request has any length.
        _Rpc(
            table.LOAD_MODEL,
            messages.LoadMessage,
            messages.LoadReader(guard),
            lambda _: pb.RepositoryModelLoadResponse(),
            max_bytes=None,
        ),
        _Rpc(
            table.UNLOAD_MODEL,
            pb.RepositoryModelUnloadRequest,
            messages.read_unload,
            lambda _: pb.RepositoryModelUnloadResponse(),
        ),
        _Rpc(
            table.UPDATE_LOG_SETTINGS,
            pb.LogSettingsRequest,
            messages.read_log_changes,
            messages.write_log_settings,
        ),
        _Rpc(
            table.UPDATE_TRACE_SETTINGS,
            pb.TraceSettingRequest,
            messages.read_trace_changes,
            messages.write_trace_settings,
        ),
        _Rpc(
            table.SYSTEM_REGIONS,
            pb.SystemSharedMemoryStatusRequest,
            messages.read_name,
            messages.write_system_regions,
        ),
        _Rpc(
            table.REGISTER_SYSTEM,
            pb.SystemSharedMemoryRegisterRequest,
            messages.read_system_registration,
            lambda _: pb.SystemSharedMemoryRegisterResponse(),
        ),
        _Rpc(
            table.UNREGISTER_SYSTEM,
            pb.SystemSharedMemoryUnregisterRequest,
            messages.read_name,
            lambda _: pb.SystemSharedMemoryUnregisterResponse(),
        ),
        _Rpc(
            table.CUDA_REGIONS,
            pb.CudaSharedMemoryStatusRequest,
            messages.read_name,
            messages.write_cuda_regions,
        ),
        _Rpc(
            table.REGISTER_CUDA,
            pb.CudaSharedMemoryRegisterRequest,
            messages.read_cuda_registration,
            lambda _: pb.CudaSharedMemoryRegisterResponse(),
        ),
        _Rpc(
            table.UNREGISTER_CUDA,
            pb.CudaSharedMemoryUnregisterRequest,
            messages.read_name,
            lambda _: pb.CudaSharedMemoryUnregisterResponse(),
        ),
    )


def _nothing(message: Any, call: UnaryRpc) -> None:
    """Reads a request without fields."""


def _handler(rpc: _Rpc, door: Door, guard: AccessGuard) -> UnaryMethod:
    message_class, read, write, operation = rpc.message_class, rpc.read, rpc.write, rpc.operation

    def handle(call: UnaryRpc, message: Buffer) -> None:
        if rpc.max_bytes is not None and len(message) > rpc.max_bytes:
            call.abort(
                ResourceExhaustedError.grpc_status,
                f"the request message has {len(message)} bytes, of which this RPC takes {rpc.max_bytes}",
            )
            return
        future = door.ask(
            operation,
            lambda: read(message_class.FromString(message), call),
            lambda result: write(result).SerializeToString(),
            call,
            guard,
            len(message),
        )
        future.add_done_callback(partial(answer, call))
        if not future.done():
            # The call may have been answered by now, and then reports no cancellation.
            call.watch(partial(give_up, call), future)

    def give_up(call: UnaryRpc, waiting: Future[Any]) -> None:
        if waiting.cancel():
            call.abort(CancelledError.grpc_status, "the client has cancelled the call")

    def answer(call: UnaryRpc, future: Future[Any]) -> None:
        if future.cancelled():
            return  # and answered
        try:
            call.reply(future.result())
        except ConchError as error:
            call.abort(error.grpc_status, error.message)
        except DecodeError as error:
            call.abort(InvalidArgumentError.grpc_status, f"the request message is malformed: {error}")
        except Exception:  # boundary: plugins, as of storage, are called below
            log.exception("%s could not be answered", message_class.__name__)
            call.abort(InternalError.grpc_status, "the request could not be answered")

    return handle
