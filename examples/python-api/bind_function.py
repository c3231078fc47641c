"""A function as a model: a script that is a server.

Run it, and ask it from elsewhere with any client of Triton's protocols, such as `conch.Client`:

    python bind_function.py
"""

import argparse

import numpy as np
import numpy.typing as npt

import conch

Floats = npt.NDArray[np.float32]


@conch.fill_optionals(scale=1.0)
@conch.group_by_values("scale")
@conch.batch
@conch.first_value("scale")
def softmax(logits: Floats, scale: np.float32) -> dict[str, Floats]:
    """Requests come together here, as many as share a scale; the arrays have all their rows."""
    if scale <= 0:
        raise conch.InvalidArgumentError(f"scale must be above 0, not {scale}")
    powers = np.exp(logits / scale - np.max(logits / scale, axis=1, keepdims=True))
    return {"probabilities": powers / powers.sum(axis=1, keepdims=True)}


def make_server(grpc_port: int, http_port: int, metrics_port: int) -> conch.Server:
    """A server with that model."""
    server = conch.Server(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    server.bind(
        "softmax",
        softmax,
        inputs=[
            conch.Tensor("logits", np.float32, (-1,)),
            conch.Tensor("scale", np.float32, (1,), optional=True),
        ],
        outputs=[conch.Tensor("probabilities", np.float32, (-1,))],
        config=conch.ModelConfig(
            max_batch_size=64, batcher=conch.DynamicBatcher(max_queue_delay_microseconds=500)
        ),
    )
    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8002)
    arguments = parser.parse_args()
    with make_server(arguments.grpc_port, arguments.http_port, arguments.metrics_port) as server:
        print(f"serving softmax at {server.grpc_url} and {server.http_url}", flush=True)
        server.serve()  # until Ctrl-C or SIGTERM


if __name__ == "__main__":
    main()
