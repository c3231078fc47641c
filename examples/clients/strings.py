"""Sends text in several scripts to the `strings` model, and some bytes that are not text."""

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

# The number of characters, of UTF-8 bytes and of characters once upper-cased all differ here.
TEXTS = [["conch", "grüße", "ωκεανός"], ["море", "海の貝", "shell 🐚"]]


def upper(client: InferenceServerClient) -> None:
    batch = np.array([[text.encode() for text in row] for row in TEXTS], dtype=np.object_)
    result = client.infer("strings", [tensor("text", batch)], client_timeout=TIMEOUT_S)
    uppers, lengths = result.as_numpy("upper"), result.as_numpy("length")
    for i, j in np.ndindex(batch.shape):
        text, shouted, length = TEXTS[i][j], uppers[i, j].decode(), int(lengths[i, j])
        expect(shouted == text.upper(), f"upper-case of {text!r} came back as {shouted!r}")
        expect(length == len(text), f"{text!r} has {len(text)} characters, the server counted {length}")
        print(f"{text} -> {shouted} ({length} characters)")


def refused(client: InferenceServerClient) -> None:
    batch = np.array([[b"\xff\xfe"]], dtype=np.object_)
    try:
        client.infer("strings", [tensor("text", batch)], client_timeout=TIMEOUT_S)
    except InferenceServerException as error:
        expect(error.status() == "StatusCode.INVALID_ARGUMENT", f"unexpected refusal: {error}")
        print(f"bytes that are not UTF-8 are refused: {error.message()}")
    else:
        raise WrongAnswer("bytes that are not UTF-8 were accepted")


def main(client: InferenceServerClient) -> None:
    upper(client)
    refused(client)


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    run(args.url, ["strings"], main)
