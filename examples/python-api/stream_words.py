"""A decoupled model: a generator whose responses reach the client one by one.

python stream_words.py
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import conch


@conch.sample
def words(text: npt.NDArray[np.object_]) -> Iterator[dict[str, list[bytes]]]:
    """One word after the other; when the client goes away, so does the generator."""
    for word in text[0].split():
        yield {"word": [word.upper()]}


def main() -> None:
    server = conch.Server(grpc_port=0, http_port=None, metrics_port=None)
    server.bind(
        "words",
        words,
        inputs=[conch.Tensor("text", str, (1,))],
        outputs=[conch.Tensor("word", str, (1,))],
        config=conch.ModelConfig(batching=False, decoupled=True),
    )
    with server:
        print(
            "in the program:",
            [result["word"][0].decode() for result in server.stream("words", {"text": ["a b c"]})],
        )
        assert server.grpc_url is not None
        with conch.Client(server.grpc_url, "words") as client:
            for result in client.stream_sample(["one by one"]):
                print("at a client:", result["word"][0].decode())


if __name__ == "__main__":
    main()
