"""Talks REST: tensors with tritonclient.http, and a text word by word with the standard library alone."""

import json
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

TEXTS = ["conch", "shell", "größe"]


def upper(client: InferenceServerClient) -> None:
    """Sends a tensor as bytes, compressed, and asks for one output as bytes and one as JSON."""
    texts = InferInput("text", [1, len(TEXTS)], "BYTES")
    texts.set_data_from_numpy(np.array([[text.encode() for text in TEXTS]], dtype=np.object_))
    outputs = [
        InferRequestedOutput("upper", binary_data=True),
        InferRequestedOutput("length", binary_data=False),
    ]
    result = client.infer("strings", [texts], outputs=outputs, request_compression_algorithm="gzip")
    words = [word.decode() for word in result.as_numpy("upper")[0]]
    lengths = result.as_numpy("length")[0].tolist()
    expect(words == [text.upper() for text in TEXTS], f"upper is {words}")
    expect(lengths == [len(text) for text in TEXTS], f"length is {lengths}")
    for text, word, length in zip(TEXTS, words, lengths, strict=True):
        print(f"{text} -> {word} ({length})")


def events(url: str, path: str, body: dict[str, object]) -> Iterator[dict[str, object]]:
    """The server-sent events that answer a request, as they come; closing it hangs up.

    That is all there is to reading them: an event is a line that begins with "data:".
    """
    connection = HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    raise WrongAnswer(f"{response.status}: {event['error']}")
                yield event
    finally:
        connection.close()


def write(url: str, prompt: str, count: int, seed: int) -> None:
    """Prints each word as it comes, then hangs up on a long text."""
    path = "/v2/models/word_chain/generate_stream"
    body: dict[str, object] = {"prompt": prompt, "max_words": count, "seed": seed}
    words = 0
    print(prompt, end="", flush=True)
    for event in events(url, path, body):
        words += 1
        print(f" {event['word']}", end="", flush=True)
    print()
    expect(0 < words <= count, f"{words} words instead of at most {count}")

    endless = events(url, path, {**body, "max_words": 1000})
    next(endless)
    endless.close()
    print("hung up on a longer text after its first word")


if __name__ == "__main__":
    parser = options(__doc__, "REST", 8000)
    parser.add_argument("--prompt", default="A", help="a word of the model's text")
    parser.add_argument("--words", type=int, default=40, help="most words to write")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    client = InferenceServerClient(args.url, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S)
    try:
        upper(client)
        write(args.url, args.prompt, args.words, args.seed)
    except InferenceServerException as error:
        sys.exit(f"error: the server at {args.url} refused a request: {error}")
    except WrongAnswer as error:
        sys.exit(f"error: wrong answer: {error}")
    except (OSError, HTTPException) as error:
        sys.exit(f"error: no server answers at {args.url}: {error}")
    finally:
        client.close()
