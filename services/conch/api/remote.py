"""What `conch.Client` and `conch.AsyncClient` have in common: all but the waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from conch.api.transport import Signature, Url, as_error
from conch.core.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError, UnsupportedError
from conch.core.request import Parameter

LOOK_S = 0.05
"""Seconds between looks at whether a model is ready."""

STREAM_HEADERS = {"triton_grpc_error": "true"}
"""Has a stream end with an error's code, which responses of a stream do not have."""


class Remote:
    """A model of a server, and what is known of it.

    Args:
        url: Where the server is.
        model: The model's name.
        version: Its version; the newest without.
        wait_s: Seconds to wait for it to be ready.
        timeout_s: Seconds that a request may take; None for any time.
        aio: Whether its client is that for coroutines.

    Raises:
        InvalidArgumentError: The url is none.
        ImportError: tritonclient is not installed.
    """

    def __init__(
        self, url: str, model: str, version: str | int, wait_s: float, timeout_s: float | None, aio: bool
    ) -> None:
        self._url = Url.parse(url)
        self._module: Any = self._url.module(aio)
        self._tensors: Any = self._url.module()
        self._model = model
        self._version = str(version)
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._client: Any = None
        self._signature: Signature | None = None

    def _request(
        self,
        signature: Signature,
        given: Sequence[npt.ArrayLike],
        named: Mapping[str, npt.ArrayLike],
        parameters: Mapping[str, Parameter] | None,
        sample: bool,
    ) -> dict[str, Any]:
        """A request as all methods of tritonclient take it.

        Raises:
            InvalidArgumentError: The inputs do not fit the model.
        """
        inputs = []
        for name, (datatype, array) in signature.arrays(given, named, sample).items():
            tensor = self._tensors.InferInput(name, list(array.shape), datatype)
            try:
                tensor.set_data_from_numpy(array)
            except Exception as error:  # tritonclient has one class for everything
                raise InvalidArgumentError(f"input '{name}': {error}") from error
            inputs.append(tensor)
        return {
            "model_name": self._model,
            "inputs": inputs,
            "model_version": self._version,
            "parameters": dict(parameters) if parameters else None,
        }

    def _know(self, answer: Any) -> Signature:
        """Keeps what the server says of the model's config."""
        self._signature = Signature(answer["config"] if self._url.grpc else answer)
        return self._signature

    @property
    def _asking(self) -> dict[str, Any]:
        """What to ask for the config with."""
        asking: dict[str, Any] = {"model_name": self._model, "model_version": self._version}
        return asking | {"as_json": True} if self._url.grpc else asking

    def _check_streams(self) -> None:
        if not self._url.grpc:
            raise UnsupportedError("responses are streamed over gRPC only: use a grpc:// url")

    def _not_ready(self, why: str) -> UnavailableError:
        return UnavailableError(f"model '{self._model}' was not ready within {self._wait_s} s: {why}")


@contextmanager
def raised_as_ours(timeout_s: float | None = None) -> Iterator[None]:
    """Gives errors the classes that they have in a server.

    Args:
        timeout_s: Seconds that the block has; None for any time.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TimeoutError) and timeout_s is not None:
            raise DeadlineExceededError(f"no answer within {timeout_s} s") from error
        known = as_error(error)
        if known is None:
            raise
        raise known from error
