"""Server reflection (grpc.reflection.v1 and v1alpha), for grpcurl and other clients without proto files."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from conch.core.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from conch.core.tensor import Buffer
from conch.frontends.grpc.rpc_calls import StreamMethod, StreamRpc
from conch.protocol import pool, reflection_pb2, reflection_v1alpha_pb2


def reflection_handlers(services: list[str]) -> dict[str, StreamMethod]:
    """Returns the handlers of both reflection services; `services` are listed, and reflection itself."""
    listed = sorted(
        [*services, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"]
    )
    return {
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": _Reflection(module, listed)
        for version, module in (("v1", reflection_pb2), ("v1alpha", reflection_v1alpha_pb2))
    }


class _Reflection:
    """One version of the service; the versions differ only in the package of their messages."""

    def __init__(self, messages: Any, services: list[str]) -> None:
        self._messages = messages
        self._services = services

    def __call__(self, call: StreamRpc) -> None:
        def on_message(message: Buffer | None) -> None:
            if message is None:
                call.close()
                return
            try:
                request = self._messages.ServerReflectionRequest.FromString(message)
            except DecodeError:
                call.close(InvalidArgumentError.grpc_status, "the request message is malformed")
                return
            call.write(self._answer(request).SerializeToString())
            call.read_next()

        call.start(on_message, lambda: None)

    def _answer(self, request: Any) -> Any:
        answer = self._messages.ServerReflectionResponse(valid_host=request.host, original_request=request)
        asked = request.WhichOneof("message_request")
        try:
            if asked == "list_services":
                for name in self._services:
                    answer.list_services_response.service.add(name=name)
            elif asked == "file_by_filename":
                self._add_files(answer, request.file_by_filename)
            elif asked == "file_containing_symbol":
                self._add_files(answer, pool.file_containing_symbol(request.file_containing_symbol))
            elif asked == "all_extension_numbers_of_type":
                # conch has no extensions, but the type must exist.
                name = request.all_extension_numbers_of_type
                pool.file_containing_symbol(name)
                answer.all_extension_numbers_response.base_type_name = name
            elif asked == "file_containing_extension":
                raise KeyError(request.file_containing_extension.containing_type)
            else:
                answer.error_response.error_code = UnsupportedError.grpc_status
                answer.error_response.error_message = "unknown reflection request"
        except KeyError as error:
            answer.error_response.error_code = NotFoundError.grpc_status
            answer.error_response.error_message = f"{error.args[0]} is not known here"
        return answer

    def _add_files(self, answer: Any, name: str) -> None:
        answer.file_descriptor_response.file_descriptor_proto.extend(pool.file_with_dependencies(name))
