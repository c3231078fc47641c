"""Region bindings: the shared-memory regions of one request, for its inputs and outputs.

Owns: a use of each region from admission to the final response, or to `release`.
Threads and locks: the admitting thread, then the threads that respond, one at a time; no lock.
"""

from __future__ import annotations

from conch.core.device import DeviceMemory
from conch.core.errors import InternalError, without_traceback
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.responder_layers import ResponderLayer
from conch.core.response_errors import unsendable
from conch.core.tensor import Tensor
from conch.memory.region import Region, check_part
from conch.memory.regions import Regions


class PlacedTensor(Tensor):
    """An output that was written to its region: name, datatype and shape without data."""

    __slots__ = ()

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...]) -> None:
        super().__init__(name, datatype, shape, b"")

    def detached(self, name: str) -> PlacedTensor:
        """The same under another name; there is nothing to copy."""
        return PlacedTensor(name, self.datatype, self.shape)


class RegionBindings:
    """The regions of one request; once attached, wraps its responder to place outputs and release regions.

    Args:
        regions: The table of regions.
    """

    __slots__ = ("_places", "_regions", "_regions_in_use", "_released", "responder")

    responder: Responder

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._regions_in_use: dict[str, Region] = {}
        self._places: dict[str, tuple[Region, int, int]] = {}
        self._released = False

    def input(
        self, region: str, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]
    ) -> Tensor:
        """Binds an input; its shape may not fit `byte_size`, which validation checks.

        Raises:
            NotFoundError: There is no such region.
            InvalidArgumentError: The input does not lie in it, or the region has shrunk; texts are Triton's.
        """
        return self._part(region, offset, byte_size).tensor(offset, byte_size, name, datatype, shape)

    def output(self, region: str, offset: int, byte_size: int, name: str) -> None:
        """Binds an output; raises the errors of `input`."""
        self._places[name] = (self._part(region, offset, byte_size), offset, byte_size)

    def attach(self, request: InferenceRequest) -> None:
        """Wraps the responder of a complete request.

        Outputs are then in their regions before the responder gets a response, and the regions are released
        after the final one.
        """
        request.region_bindings = self
        request.wrap_responder(self._set_responder, ResponderLayer.REGIONS)

    def release(self) -> None:
        """Releases all regions, once: the request is answered, or was never submitted."""
        if not self._released:
            self._released = True
            for region in self._regions_in_use.values():
                self._regions.release_region(region)

    def buffer(self, name: str, byte_size: int) -> memoryview | None:
        """Memory for an output to be written to directly; None if there is none, or too little."""
        place = self._places.get(name)
        if place is None or byte_size > place[2] or self._released:
            return None
        return place[0].buffer(place[1], byte_size)

    def device(self, name: str) -> DeviceMemory | None:
        """The device memory of an output; None if it goes elsewhere."""
        place = self._places.get(name)
        return None if place is None or self._released else place[0].device(place[1], place[2])

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Places the outputs of a response and passes it on."""
        if response is not None and response.error is None:
            try:
                response = self._placed(response)
            except Exception as error:  # a model may return any object as an output
                shown = unsendable(request.model_name, response, error)
                response = InferenceResponse([], without_traceback(shown))
        try:
            self.responder(request, response, final)
        finally:
            if final:
                self.release()

    def _set_responder(self, responder: Responder) -> RegionBindings:
        self.responder = responder
        return self

    def _part(self, name: str, offset: int, byte_size: int) -> Region:
        region = self._regions_in_use.get(name)
        if region is None:
            region = self._regions_in_use[name] = self._regions.acquire_region(name)
        check_part(name, region.byte_size, offset, byte_size)
        region.check()
        return region

    def _placed(self, response: InferenceResponse) -> InferenceResponse:
        """Writes outputs to their regions.

        Raises:
            ConchError: An output does not fit, or a region lost its memory while it was in use.
        """
        outputs: list[Tensor] = []
        for tensor in response.outputs:
            place = self._places.get(tensor.name)
            if place is None:
                outputs.append(tensor)
                continue
            region, offset, byte_size = place
            if tensor.nbytes > byte_size:
                raise InternalError(
                    f"shared memory size specified with the request for output '{tensor.name}' "
                    f"({byte_size} bytes) should be at least {tensor.nbytes} bytes to hold the results"
                )
            region.write(offset, byte_size, tensor)
            outputs.append(PlacedTensor(tensor.name, tensor.datatype, tensor.shape))
        # Last, so that it covers all reads of inputs and writes of outputs.
        for region in self._regions_in_use.values():
            region.check()
        return InferenceResponse(outputs, None, response.parameters)


def bind_regions(regions: Regions, request: InferenceRequest) -> None:
    """Binds the regions that a request names, and forgets their names.

    Args:
        regions: The table of regions.
        request: The request; gets `region_bindings`, and inputs with data.

    Raises:
        ConchError: A tensor does not lie in its region, or there is no such region; texts are Triton's.
    """
    named, request.named_regions = request.named_regions, None
    assert named is not None, "it has regions"
    request.region_bindings = bindings = RegionBindings(regions)
    inputs = request.inputs
    for name, part in named.inputs.items():
        inputs[name] = bindings.input(*part, name, inputs[name].datatype, inputs[name].shape)
    for name, part in named.outputs.items():
        bindings.output(*part, name)
