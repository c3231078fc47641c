"""The wrappers of a request's responder, in the order in which they lie around it.

A response of the model goes through them from the last one to the first, and then to the client. Each is
added outside those before it, so calls of `InferenceRequest.wrap_responder` come in this order too;
only those that belong inside the regions come after them.
"""

from __future__ import annotations

from enum import Enum


class ResponderLayer(Enum):
    """A wrapper of a responder.

    Attributes:
        waits: True if it may hold responses, see `InferenceRequest.responses_wait`.
        inside_regions: True if it lies just inside `REGIONS`, if the request has some.
    """

    # The innermost: a request leaves its principal's limit when all else is done with its final response.
    LIMIT = ("limit",)
    # Inside the regions, as placing an output may fail, and the log has the error that the client gets.
    WATCH = "watch", False, True
    # Backends write outputs to a region directly only if this is the outermost.
    REGIONS = ("regions",)
    # Outside the regions: the error for a surplus response takes the place of outputs before they are placed.
    SINGLE = "single", True
    # Outside the regions: what it keeps for a comparison is what the model made, not what was placed.
    SHADOW = ("shadow",)
    # Outside all that depends on this one request: what it stores is the response as the model gave it.
    CACHE = ("cache",)
    # When the model has taken the request; inside the regions for the same reason as the watch.
    LINES = "lines", False, True
    # When the request is queued: the order is that of the queue.
    ORDER = "order", True
    # When a batch begins, and so outermost: times and counts are those of the model.
    TRACKER = ("tracker",)

    def __init__(self, title: str, waits: bool = False, inside_regions: bool = False) -> None:
        self.waits = waits
        self.inside_regions = inside_regions
