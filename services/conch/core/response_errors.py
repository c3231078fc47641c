"""Errors of responses that can't be encoded: finds whether the model or the server is at fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import prod

from conch.core.errors import ConchError, InternalError, message_of
from conch.core.request import InferenceResponse
from conch.core.tensor import ELEMENT_SIZES

log = logging.getLogger(__name__)

_MOST_SHOWN_BITS = 256


def unsendable(model: str, response: InferenceResponse | None, error: Exception) -> ConchError:
    """The error for the client of a response that could not be sent; logs an unknown `error`."""
    if isinstance(error, ConchError):
        return error
    fault = at_fault(model, response)
    if fault is not None:
        return fault
    log.error("a response of model '%s' could not be sent", model, exc_info=error)
    return InternalError("the response could not be sent")


def at_fault(model: str, response: InferenceResponse | None) -> InternalError | None:
    """Finds and logs what is wrong with a model's response; None if nothing is.

    Takes as long as sending, so it is called only after sending has failed.
    """
    if response is None or response.error is not None:
        return None
    fault = _fault(model, response)
    if fault is not None:
        log.error("%s", fault.message)
    return fault


def wrong_parameter(model: str, key: str, value: object) -> InternalError:
    """The error for a response parameter that the protocol can't carry."""
    what = f"response parameter '{key}' of model '{model}'"
    if not isinstance(value, int):
        return InternalError(f"{what} must be a bool, int, float or str, not {type(value).__name__}")
    bits = value.bit_length()
    shown = str(value) if bits <= _MOST_SHOWN_BITS else f"a number of {bits} bits"
    return InternalError(f"{what} must fit into 64 bits, {shown} does not")


def _fault(model: str, response: InferenceResponse) -> InternalError | None:
    for key, value in (response.parameters or {}).items():
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return wrong_parameter(model, key, value)
        for text in (key, value):
            if isinstance(text, str) and (reason := _failure(text.encode)) is not None:
                return InternalError(f"response parameter '{key}' of model '{model}' can't be sent: {reason}")
    for tensor in response.outputs:
        if tensor.datatype != "BYTES":
            nbytes = prod(tensor.shape) * ELEMENT_SIZES.get(tensor.datatype, 0)
            if tensor.nbytes != nbytes:  # the model has resized the array
                return InternalError(
                    f"output '{tensor.name}' of model '{model}' can't be sent: it has {tensor.nbytes} bytes, "
                    f"but {nbytes} by its shape {list(tensor.shape)}"
                )
            continue
        if (reason := _failure(partial(getattr, tensor, "data"))) is not None:
            return InternalError(f"output '{tensor.name}' of model '{model}' can't be sent: {reason}")
    return None


def _failure(make: Callable[[], object]) -> str | None:
    """The error message of a call; None if it succeeds."""
    try:
        make()
    except MemoryError:
        return None  # not the model's fault
    except Exception as error:  # boundary: arrays of models
        return message_of(error)
    return None
