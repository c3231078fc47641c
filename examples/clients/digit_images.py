"""Sends PNG and JPEG files of handwritten digits to an ensemble, which decodes and classifies them."""

import io
from pathlib import Path

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from PIL import Image
from tritonclient.grpc import InferenceServerClient, InferRequestedOutput
from tritonclient.utils import InferenceServerException

DATA = Path(__file__).resolve().parents[1] / "data" / "digits_heldout.npz"
MODEL = "digit_reader"
PIXEL_MAX = 16
LARGER = 20
BATCH = 32
LEAST_ACCURACY = 0.95


def encode(image: np.ndarray, kind: str) -> bytes:
    """An image of 8x8 pixels as a larger file: dark ink on light paper."""
    grey = 255 - image.reshape(8, 8).astype(np.float32) * 255 / PIXEL_MAX
    pixels = np.kron(grey, np.ones((LARGER, LARGER))).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=90)
    return file.getvalue()


def read(client: InferenceServerClient, files: list[bytes]) -> tuple[np.ndarray, list[str]]:
    """The digit in each file, and the label of its most probable class."""
    batch = np.array(files, dtype=np.object_).reshape(-1, 1)
    outputs = [InferRequestedOutput("probabilities", class_count=1), InferRequestedOutput("digit")]
    result = client.infer(MODEL, [tensor("file", batch)], outputs=outputs, client_timeout=TIMEOUT_S)
    labels = [row[0].decode().split(":")[2] for row in result.as_numpy("probabilities")]
    return result.as_numpy("digit")[:, 0], labels


def refused(client: InferenceServerClient) -> None:
    try:
        read(client, [b"GIF89a, or so it says"])
    except InferenceServerException as error:
        expect(error.status() == "StatusCode.INVALID_ARGUMENT", f"unexpected refusal: {error}")
        print(f"other files are refused: {error.message()}")
    else:
        raise WrongAnswer("a file that is no image was accepted")


def main(client: InferenceServerClient) -> None:
    with np.load(DATA) as data:
        images, digits = data["images"], data["labels"].astype(np.int64)
    for kind in ("PNG", "JPEG"):
        files = [encode(image, kind) for image in images]
        right = 0
        for start in range(0, len(files), BATCH):
            found, labels = read(client, files[start : start + BATCH])
            right += int((found == digits[start : start + BATCH]).sum())
            if not start:
                print(f"{kind}: the first are {', '.join(labels[:5])}")
        print(f"{kind}: {right} of {len(files)} held-out images right ({right / len(files):.2%})")
        expect(right >= LEAST_ACCURACY * len(files), f"more than {LEAST_ACCURACY:.0%} are known to be")
    refused(client)


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    run(args.url, [MODEL], main)
