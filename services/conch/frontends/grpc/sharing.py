"""The RPCs of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from conch.frontends.grpc.adapter import UnaryHandler
from conch.frontends.grpc.control import answering, answering_later
from conch.memory.regions import Regions
from conch.protocol import inference_pb2 as pb


class SharedMemoryHandlers:
    """Answers what clients ask about regions.

    Args:
        regions: The regions.
        opening: Opens and closes them, off the polling threads.
    """

    def __init__(self, regions: Regions, opening: Executor) -> None:
        self._regions = regions
        self._opening = opening

    def handlers(self) -> dict[str, UnaryHandler]:
        """The handlers by method."""
        service = "/inference.GRPCInferenceService/"
        status: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, self._system_status),
            "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, self._cuda_status),
        }
        changes: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, self._register_system),
            "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, self._unregister_system),
            "CudaSharedMemoryRegister": (pb.CudaSharedMemoryRegisterRequest, self._register_cuda),
            "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, self._unregister_cuda),
        }
        return {service + name: answering(kind, answer) for name, (kind, answer) in status.items()} | {
            service + name: answering_later(kind, answer, self._opening)
            for name, (kind, answer) in changes.items()
        }

    def _system_status(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions.system_regions(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def _register_system(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _unregister_system(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister_system(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._regions.cuda_regions(request.name):
            status = response.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
        return response

    def _register_cuda(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def _unregister_cuda(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._regions.unregister_cuda(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()
