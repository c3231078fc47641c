"""`conch infer` as a library: a model of a running server, its signature and requests to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from conch.core.tensor import Tensor
from conch_tools.connection import Endpoint, parse_url
from conch_tools.infer.client import InferClient, InferRequest, InferResponse, open_client
from conch_tools.infer.input_values import InputError, make_tensors
from conch_tools.infer.signature import read_signature
from conch_tools.server_api import ServerApi


def infer(
    endpoint: Endpoint | str, model: str, inputs: Mapping[str, Any], *, version: str = "", **request: Any
) -> InferResponse:
    """The response of a model to one request, on a connection of its own.

    Args:
        endpoint: The server's data port, or its URL.
        model: The model's name.
        inputs: Values by input.
        version: The model's version; the server's choice if empty.
        request: Keywords of `RemoteModel.request`.

    Raises:
        UrlError: The URL is wrong.
        InputError: A value or a name does not fit the model.
        AskError: The server can't be reached, or refuses; `CallError` if the request failed.
    """
    with RemoteModel(endpoint, model, version) as remote:
        return remote.infer(remote.request(inputs, **request))


class RemoteModel:
    """A model of a server.

    Args:
        endpoint: The server's data port, or its URL.
        name: The model's name.
        version: Its version; the server's choice if empty.

    Raises:
        UrlError: The URL is wrong.
        AskError: The server can't be reached, or has no such model.
    """

    def __init__(self, endpoint: Endpoint | str, name: str, version: str = "") -> None:
        self.endpoint = parse_url(endpoint) if isinstance(endpoint, str) else endpoint
        self.signature = read_signature(ServerApi(self.endpoint), name, version)
        self._name = name
        self._version = version
        self._client: InferClient | None = None

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the next request opens another."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def connect(self) -> InferClient:
        """A connection of its own, for another thread."""
        return open_client(self.endpoint, self.signature)

    def request(
        self,
        inputs: Mapping[str, Any],
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        outputs: Sequence[str] = (),
        classes: int = 0,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> InferRequest:
        """A request that has been checked against the model.

        Args:
            inputs: Values by input: JSON, an array, or `bytes` for one element of BYTES. The batch dimension
                may be left out.
            shapes: Shapes of inputs.
            outputs: Names of the outputs to return; all if empty.
            classes: Number of classes to return of each output of numbers; 0 for values.
            parameters: Request parameters.
            request_id: The request's id.
            timeout_s: Time limit; None for no limit.

        Raises:
            InputError: A value or a name does not fit the model.
        """
        return self.request_of(
            make_tensors(self.signature, inputs, shapes),
            outputs=outputs,
            classes=classes,
            parameters=parameters,
            request_id=request_id,
            timeout_s=timeout_s,
        )

    def request_of(
        self,
        tensors: Sequence[Tensor],
        *,
        outputs: Sequence[str] = (),
        classes: int = 0,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> InferRequest:
        """As `request`, of tensors that fit the model."""
        known = {rule.name: rule for rule in self.signature.outputs}
        for name in outputs:
            if name not in known:
                raise InputError(
                    f"model '{self._name}' has no output '{name}'; it has "
                    f"{', '.join(map(str, self.signature.outputs))}"
                )
        for name, value in (parameters or {}).items():
            if not isinstance(value, (bool, int, float, str)):
                raise InputError(f"parameter '{name}' is a text, a number, true or false, not {value!r}")
        if classes and not outputs:
            outputs = [rule.name for rule in self.signature.outputs if rule.datatype != "BYTES"]
        return InferRequest(
            model=self._name,
            version=self._version,
            id=request_id,
            inputs=tensors,
            outputs=outputs,
            classes=classes,
            parameters=parameters or {},
            timeout_s=timeout_s,
        )

    def infer(self, request: InferRequest) -> InferResponse:
        """The response to a request. Raises CallError."""
        return self._connected().infer(request)

    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """The responses to a request, as they come. Raises CallError."""
        return self._connected().stream(request)

    def _connected(self) -> InferClient:
        if self._client is None:
            self._client = self.connect()
        return self._client
