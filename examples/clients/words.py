"""Has a decoupled model write text, and prints each word as it comes; then hangs up on a long one."""

import queue
import time

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient, InferResult
from tritonclient.utils import InferenceServerException

MODEL = "word_chain"
Answers = queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]]


def ask(client: InferenceServerClient, prompt: str, count: int, seed: int) -> Answers:
    """Sends one request over a stream of its own; the caller stops the stream."""
    answers: Answers = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
    inputs = [
        tensor("prompt", np.array([prompt.encode()], dtype=np.object_)),
        tensor("max_words", np.array([count], dtype=np.int32)),
        tensor("seed", np.array([seed], dtype=np.int64)),
    ]
    # Without this nothing is sent after the last word, and the client does not know that it was the last one.
    client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
    return answers


def next_word(answers: Answers) -> str | None:
    """The next word; None at the end."""
    try:
        result, error = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise WrongAnswer(f"no word came in {TIMEOUT_S:g} s") from None
    if result is None:
        raise error or WrongAnswer("a message with neither a result nor an error")
    if result.get_response().parameters["triton_final_response"].bool_param:
        return None
    return result.as_numpy("word")[0].decode()


def write(client: InferenceServerClient, prompt: str, count: int, seed: int) -> None:
    answers = ask(client, prompt, count, seed)
    words = [prompt]
    try:
        print(prompt, end="", flush=True)
        while (word := next_word(answers)) is not None:
            words.append(word)
            print(f" {word}", end="", flush=True)
        print()
    finally:
        client.stop_stream(cancel_requests=True)
    expect(1 < len(words) <= count + 1, f"{len(words) - 1} words instead of at most {count}")

    # One response is what a plain call can carry too.
    first = client.infer(
        MODEL,
        [
            tensor("prompt", np.array([prompt.encode()], dtype=np.object_)),
            tensor("max_words", np.array([1], dtype=np.int32)),
            tensor("seed", np.array([seed], dtype=np.int64)),
        ],
        client_timeout=TIMEOUT_S,
    )
    expect(first.as_numpy("word")[0].decode() == words[1], "a plain call gives another first word")

    answers = ask(client, prompt, 1000, seed)
    next_word(answers)
    start = time.monotonic()
    client.stop_stream(cancel_requests=True)
    print(f"hung up on a longer text after its first word, in {(time.monotonic() - start) * 1e3:.0f} ms")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--prompt", default="A", help="a word of the model's text")
    parser.add_argument("--words", type=int, default=40, help="most words to write")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    run(args.url, [MODEL], lambda client: write(client, args.prompt, args.words, args.seed))
