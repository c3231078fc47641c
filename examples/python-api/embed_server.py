"""A whole server inside a program: a repository and a function, asked directly and over the network.

python embed_server.py ../models
"""

import asyncio
import sys

import numpy as np

import conch


@conch.batch
def negate(X: np.typing.NDArray[np.int32]) -> dict[str, np.typing.NDArray[np.int32]]:
    return {"Y": -X}


async def ask_many(server: conch.Server) -> int:
    """Requests of coroutines share batches like those of clients."""
    requests = [server.infer_async("negate", {"X": [[number]]}) for number in range(10)]
    return sum(int(result["Y"][0, 0]) for result in await asyncio.gather(*requests))


def main() -> None:
    repository = sys.argv[1]
    with conch.Server(
        repository, model_control_mode="explicit", grpc_port=0, http_port=0, metrics_port=None
    ) as server:
        server.load("simple")
        row = np.arange(16, dtype=np.int32)[np.newaxis]
        result = server.infer("simple", {"INPUT0": row, "INPUT1": row})
        print("simple says", result["OUTPUT0"][0, :4])

        server.bind(
            "negate", negate, [conch.Tensor("X", np.int32, (1,))], [conch.Tensor("Y", np.int32, (1,))]
        )
        print("negate says", asyncio.run(ask_many(server)))

        assert server.grpc_url is not None
        with conch.Client(server.grpc_url, "simple") as client:
            print("a client is told", client.infer_sample(row[0], row[0])["OUTPUT1"][:4])
        print("ready:", [model.name for model in server.models if model.state == "READY"])


if __name__ == "__main__":
    main()
