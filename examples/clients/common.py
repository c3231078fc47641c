"""Options, connection and error handling of every example client."""

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

TIMEOUT_S = 30.0


class WrongAnswer(Exception):
    """The server answered, but not what it should have."""


def expect(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise WrongAnswer(message)


def tensor(name: str, value: np.ndarray) -> InferInput:
    """A request input with the array's shape, data type and contents."""
    result = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    result.set_data_from_numpy(value)
    return result


def options(description: str | None, protocol: str = "gRPC", port: int = 8001) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default=f"localhost:{port}", help=f"host:port of the {protocol} endpoint")
    return parser


def run(url: str, models: Sequence[str], body: Callable[[InferenceServerClient], None]) -> None:
    """Runs `body` with a connected client; any failure ends the process with its reason and status 1."""
    with InferenceServerClient(url) as client:
        try:
            client.is_server_live(client_timeout=TIMEOUT_S)
        except InferenceServerException as error:
            sys.exit(f"error: no server answers at {url}: {error.message()}")
        try:
            # Not the server's readiness: one failed model can take that away, and the others still serve.
            for model in models:
                if not client.is_model_ready(model, client_timeout=TIMEOUT_S):
                    sys.exit(f"error: the server at {url} answers, but its model '{model}' is not ready")
            body(client)
        except InferenceServerException as error:
            sys.exit(f"error: the server at {url} refused a request: {error}")
        except WrongAnswer as error:
            sys.exit(f"error: wrong answer: {error}")
