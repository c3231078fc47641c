"""What one request uses of regions: where its inputs are, and where its outputs go."""

from __future__ import annotations

import logging
from collections.abc import Callable

from conch.core.device import DeviceMemory
from conch.core.errors import ConchError, InternalError, as_conch_error, without_traceback
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.sending import at_fault
from conch.core.tensor import Tensor
from conch.memory.keys import check_part
from conch.memory.region import Region
from conch.memory.regions import Regions

log = logging.getLogger(__name__)


class PlacedTensor(Tensor):
    """An output that has been written to its region: a name, a datatype and a shape, without data."""

    __slots__ = ()

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...]) -> None:
        super().__init__(name, datatype, shape, b"")

    def detached(self, name: str) -> PlacedTensor:
        """The same under another name: there is nothing to be copied."""
        return PlacedTensor(name, self.datatype, self.shape)


class LargeUseError(Exception):
    """A request uses more of regions than whoever decodes it has time for."""


class Uses:
    """Collects what a request uses while it is decoded, then stands between it and its responder.

    Args:
        regions: The regions.
        most_bytes: How many bytes of them the request may use before that is a `LargeUseError`: some are
            copied, and caches look at all of them. None for any number.
    """

    __slots__ = ("_held", "_left", "_places", "_regions", "_released", "responder")

    responder: Responder

    def __init__(self, regions: Regions, most_bytes: int | None = None) -> None:
        self._regions = regions
        self._left = most_bytes
        self._held: dict[str, Region] = {}
        self._places: dict[str, tuple[Region, int, int]] = {}
        self._released = False

    def __bool__(self) -> bool:
        """Whether the request uses any region."""
        return bool(self._held)

    def input(
        self, region: str, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]
    ) -> Tensor:
        """An input that lies in a region.

        Args:
            region: Name of the region.
            offset: Where in the region it begins.
            byte_size: How long it is.
            name: Name of the input.
            datatype: Its datatype.
            shape: Its dimensions, which nobody has compared with its size yet.

        Raises:
            NotFoundError: There is no such region.
            InvalidArgumentError: The input does not lie in it, or the region has shrunk; texts are Triton's.
        """
        return self._part(region, offset, byte_size).tensor(offset, byte_size, name, datatype, shape)

    def output(self, region: str, offset: int, byte_size: int, name: str) -> None:
        """Says where an output is to be written; for arguments and errors see `input`."""
        self._places[name] = (self._part(region, offset, byte_size), offset, byte_size)

    def attach(self, request: InferenceRequest) -> None:
        """Takes its place between a request that is complete and its responder.

        From here on outputs are in their places before the responder gets the response, and regions are
        released after the last one.
        """
        request.uses = self
        request.intercept(self._before)

    def intercept(self, between: Callable[[Responder], Responder]) -> None:
        """Puts something behind this, where it sees what the responder sees; only after `attach`.

        Args:
            between: Makes it of the responder that there is.
        """
        self.responder = between(self.responder)

    def release(self) -> None:
        """Gives up all regions: the request has been answered, or is never submitted."""
        if not self._released:
            self._released = True
            for region in self._held.values():
                self._regions.release(region)

    def buffer(self, name: str, byte_size: int) -> memoryview | None:
        """Memory to which an output can be written directly; None where there is none, or not enough."""
        place = self._places.get(name)
        if place is None or byte_size > place[2] or self._released:
            return None
        return place[0].buffer(place[1], byte_size)

    def device(self, name: str) -> DeviceMemory | None:
        """Where an output goes in the memory of a device; None if it goes elsewhere."""
        place = self._places.get(name)
        return None if place is None or self._released else place[0].device(place[1], place[2])

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response on its way to the responder."""
        if response is not None and response.error is None:
            try:
                response = self._placed(response)
            except Exception as error:  # an output may be anything that a model calls one
                shown = error if isinstance(error, ConchError) else at_fault(request.model_name, response)
                if shown is None:
                    log.exception("an output of model '%s' could not be written", request.model_name)
                    shown = as_conch_error(error)
                response = InferenceResponse([], without_traceback(shown))
        try:
            self.responder(request, response, final)
        finally:
            if final:
                self.release()

    def _before(self, responder: Responder) -> Uses:
        self.responder = responder
        return self

    def _part(self, name: str, offset: int, byte_size: int) -> Region:
        region = self._held.get(name)
        if region is None:
            region = self._held[name] = self._regions.acquire(name)
        check_part(name, region.byte_size, offset, byte_size)
        if self._left is not None:
            self._left -= byte_size
            if self._left < 0:
                raise LargeUseError
        region.check()
        return region

    def _placed(self, response: InferenceResponse) -> InferenceResponse:
        """The response with its outputs in their places.

        Raises:
            ConchError: One does not fit, or a region was not there as long as it was needed.
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
        # Last: what was read of the inputs, and written of the outputs, was there all the time.
        for region in self._held.values():
            region.check()
        return InferenceResponse(outputs, None, response.parameters)
