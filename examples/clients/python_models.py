"""Tries every model of examples/models/python, or those that are named, and prints what they answer."""

import io
import queue
from collections.abc import Callable

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from PIL import Image
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

A = np.array([1, 2, 3, 4], np.float32)
B = np.array([10, 20, 30, 40], np.float32)


def ask(
    client: InferenceServerClient, model: str, inputs: list[InferInput], *outputs: str
) -> list[np.ndarray]:
    result = client.infer(model, inputs, client_timeout=TIMEOUT_S)
    return [result.as_numpy(name) for name in outputs]


def ask_for_many(
    client: InferenceServerClient, model: str, inputs: list[InferInput], *outputs: str
) -> list[list[np.ndarray]]:
    """All responses of a decoupled model to one request."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
    responses = []
    try:
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        final = False
        while not final:
            try:
                result, error = answers.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise WrongAnswer(f"{model}: no response came in {TIMEOUT_S:g} s") from None
            if result is None:
                raise error
            message = result.get_response()
            final = message.parameters["triton_final_response"].bool_param
            if message.outputs:
                responses.append([result.as_numpy(name) for name in outputs])
    finally:
        client.stop_stream(cancel_requests=True)
    return responses


def strings(name: str, *values: str | bytes, shape: tuple[int, ...] = (-1,)) -> InferInput:
    encoded = [value if isinstance(value, bytes) else value.encode() for value in values]
    return tensor(name, np.array(encoded, np.object_).reshape(shape))


def try_add_sub(client: InferenceServerClient) -> str:
    total, difference = ask(
        client, "add_sub", [tensor("INPUT0", A), tensor("INPUT1", B)], "OUTPUT0", "OUTPUT1"
    )
    expect(np.array_equal(total, A + B) and np.array_equal(difference, A - B), "add_sub: wrong")
    return f"{A} and {B}: {total} and {difference}"


def try_auto_complete(client: InferenceServerClient) -> str:
    config = client.get_model_config("auto_complete", client_timeout=TIMEOUT_S).config
    expect(config.max_batch_size == 16, "auto_complete: its config lacks what it said of itself")
    texts = strings("TEXT", "one", "two words", "and now three", shape=(3, 1))
    (counts,) = ask(client, "auto_complete", [texts], "WORDS")
    expect(counts.ravel().tolist() == [1, 2, 3], f"auto_complete: {counts}")
    return f"words counted: {counts.ravel().tolist()}, in batches of up to {config.max_batch_size}"


def try_bls(client: InferenceServerClient) -> str:
    inputs = [tensor("INPUT0", A), tensor("INPUT1", B)]
    total, difference = ask(client, "bls", [strings("MODEL_NAME", "add_sub"), *inputs], "OUTPUT0", "OUTPUT1")
    expect(np.array_equal(total, A + B) and np.array_equal(difference, A - B), "bls: wrong")
    try:
        ask(client, "bls", [strings("MODEL_NAME", "nobody"), *inputs], "OUTPUT0")
    except InferenceServerException as error:
        expect("nobody" in error.message(), f"bls: the error does not name the model: {error}")
        return f"add_sub says {total} and {difference}; a model that is not there: {error.message()}"
    raise WrongAnswer("bls: a model that is not there gave an answer")


def try_bls_async(client: InferenceServerClient) -> str:
    inputs = [tensor("INPUT0", A), tensor("INPUT1", B)]
    total, difference = ask(client, "bls_async", inputs, "OUTPUT0", "OUTPUT1")
    expect(np.array_equal(total, A + B) and np.array_equal(difference, A - B), "bls_async: wrong")
    return f"{total} from one call, {difference} from another"


def try_chat(client: InferenceServerClient) -> str:
    stream = tensor("stream", np.array([True]))
    responses = ask_for_many(client, "chat", [strings("text_input", "one two three"), stream], "text_output")
    words = [text[0].decode() for (text,) in responses]
    expect("".join(words) == "one three two ", f"chat: {words}")
    return f"{words}"


def try_repeat(client: InferenceServerClient) -> str:
    inputs = [
        tensor("IN", np.array([4, 2, 0, 1], np.int32)),
        tensor("DELAY", np.array([1, 2, 3, 4], np.uint32)),
        tensor("WAIT", np.array([5], np.uint32)),
    ]
    responses = ask_for_many(client, "repeat", inputs, "OUT", "IDX")
    found = [(int(out[0]), int(index[0])) for out, index in responses]
    expect(found == [(4, 0), (2, 1), (0, 2), (1, 3)], f"repeat: {found}")
    return f"{len(found)} responses: {found}"


def try_square(client: InferenceServerClient) -> str:
    counts = {}
    for number in (0, 1, 7):
        sent = tensor("IN", np.array([number], np.int32))
        responses = ask_for_many(client, "square", [sent], "OUT")
        expect(
            all(out.tolist() == [number] for (out,) in responses), "square: a response holds another number"
        )
        counts[number] = len(responses)
    expect(counts == {0: 0, 1: 1, 7: 7}, f"square: {counts}")
    return f"responses by number: {counts}"


def try_custom_metrics(client: InferenceServerClient) -> str:
    (lengths,) = ask(client, "custom_metrics", [strings("TEXT", "a", "größer", "")], "LENGTHS")
    expect(lengths.tolist() == [1, 6, 0], f"custom_metrics: {lengths}")
    return (
        f"lengths {lengths.tolist()}; see texts_total, longest_text and text_characters on the metrics port"
    )


def try_preprocessing(client: InferenceServerClient) -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (255, 0, 0)).save(file, "PNG")
    image = strings("IMAGE", file.getvalue(), shape=(1, 1))
    (pixels,) = ask(client, "preprocessing", [image], "PIXELS")
    channels = pixels[0, :, 0, 0]
    wanted = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    expect(pixels.shape == (1, 3, 224, 224) and np.allclose(channels, wanted, atol=1e-5), f"{channels}")
    try:
        ask(client, "preprocessing", [strings("IMAGE", "no image", shape=(1, 1))], "PIXELS")
    except InferenceServerException as error:
        return f"red is {channels.round(2).tolist()}; other files are refused: {error.message()[:40]}..."
    raise WrongAnswer("preprocessing: what is no image was taken")


def try_iterative(client: InferenceServerClient) -> str:
    start = tensor("START", np.array([[6]], np.int64))
    numbers = [int(number.ravel()[0]) for (number,) in ask_for_many(client, "iterative", [start], "NUMBER")]
    expect(numbers == [6, 3, 10, 5, 16, 8, 4, 2, 1], f"iterative: {numbers}")
    return f"{numbers}"


TRIES: dict[str, Callable[[InferenceServerClient], str]] = {
    name.removeprefix("try_"): function
    for name, function in list(globals().items())
    if name.startswith("try_")
}


def try_one(url: str, model: str) -> None:
    run(url, [model], lambda client: print(f"{model}: {TRIES[model](client)}"))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(TRIES)}")
    args = parser.parse_args()
    for model in args.models or TRIES:
        if model not in TRIES:
            parser.error(f"there is no model '{model}' here")
        try_one(args.url, model)
