"""Classifies handwritten digits the model has never seen, in many small concurrent requests."""

import functools
import queue
import threading
from pathlib import Path

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

DATA = Path(__file__).resolve().parents[1] / "data" / "digits_heldout.npz"
SHADES = " .:-=+*#%@"
PIXEL_MAX = 16
LEAST_ACCURACY = 0.95


def show(client: InferenceServerClient, images: np.ndarray, labels: np.ndarray) -> None:
    """Prints images side by side; their names come from the model's labels, by classification."""
    outputs = [InferRequestedOutput("probabilities", class_count=2), InferRequestedOutput("digit")]
    result = client.infer("digits", [tensor("image", images)], outputs=outputs, client_timeout=TIMEOUT_S)
    pixels = images.reshape(-1, 8, 8).astype(int) * (len(SHADES) - 1) // PIXEL_MAX
    for row in pixels.swapaxes(0, 1):
        # Twice each: a character is about twice as high as it is wide.
        print("   ".join("".join(SHADES[shade] * 2 for shade in image) for image in row))
    ranks = [[entry.decode().split(":") for entry in row] for row in result.as_numpy("probabilities")]
    for rank in range(2):
        print("   ".join(f"{row[rank][2]} {float(row[rank][0]):.1%}".ljust(16) for row in ranks))
    print("   ".join(f"(written: {label})".ljust(16) for label in labels))
    best = [int(row[0][1]) for row in ranks]
    digits = result.as_numpy("digit")[:, 0].tolist()
    expect(best == digits, f"the most probable classes are {best}, but 'digit' says {digits}")


def classify(
    client: InferenceServerClient, images: np.ndarray, batch_size: int, in_flight: int
) -> np.ndarray:
    """The digit of every image, sent `batch_size` at a time with up to `in_flight` requests open."""
    done: queue.SimpleQueue[tuple[int, InferResult | None, InferenceServerException | None]]
    done = queue.SimpleQueue()
    slots = threading.Semaphore(in_flight)

    def finished(start: int, result: InferResult | None, error: InferenceServerException | None) -> None:
        done.put((start, result, error))
        slots.release()

    starts = range(0, len(images), batch_size)
    for start in starts:
        batch = tensor("image", images[start : start + batch_size])
        slots.acquire()
        callback = functools.partial(finished, start)
        client.async_infer("digits", [batch], callback, client_timeout=TIMEOUT_S)

    digits = np.full(len(images), -1, dtype=np.int64)
    for _ in starts:
        start, result, error = done.get()
        if result is None:
            raise error or WrongAnswer("a response with neither a result nor an error")
        probabilities = result.as_numpy("probabilities")
        size = len(images[start : start + batch_size])
        expect(probabilities.shape == (size, 10), f"{size} images, probabilities of {probabilities.shape}")
        expect(np.allclose(probabilities.sum(axis=1), 1, atol=1e-4), "probabilities do not add up to 1")
        digits[start : start + size] = result.as_numpy("digit")[:, 0]
    return digits


def main(client: InferenceServerClient, batch_size: int, in_flight: int) -> None:
    with np.load(DATA) as data:
        images, labels = data["images"].astype(np.float32), data["labels"].astype(np.int64)
    show(client, images[:5], labels[:5])
    right = classify(client, images, batch_size, in_flight) == labels
    requests = -(-len(images) // batch_size)
    print(f"{right.sum()} of {len(images)} held-out images right ({right.mean():.2%}), {requests} requests")
    expect(right.mean() >= LEAST_ACCURACY, f"the model is known to get more than {LEAST_ACCURACY:.0%} right")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="images in a request, at most 64")
    parser.add_argument("--in-flight", type=int, default=16, help="requests open at a time")
    args = parser.parse_args()
    run(args.url, ["digits"], lambda client: main(client, args.batch_size, args.in_flight))
