"""`pb_utils.InferenceTrace`: names the request that a call of a model belongs to.

No state of its own. Threads: any.
"""

from __future__ import annotations

from conch.core.request import InferenceRequest as CoreRequest


class InferenceTrace:
    """The trace of a request; one that is made without a request traces nothing.

    Attributes:
        _core: The request; None for no trace.
    """

    __slots__ = ("_context", "_core")

    def __init__(self, _core: CoreRequest | None = None) -> None:
        self._core = _core
        watch = None if _core is None else _core.watch
        self._context = "" if watch is None else watch.trace_context

    def get_context(self) -> str | None:
        """JSON with the headers of W3C Trace Context for what the model calls; None if it is not traced."""
        return self._context or None


INHERITED = InferenceTrace()
"""Default of calls: the trace of the only request that the model executes."""
