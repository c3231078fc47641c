"""Turns PNG and JPEG files into the 8x8 pixels that the digit classifier reads."""

from __future__ import annotations

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, UnidentifiedImageError

SIDE = 8
INK = 16.0
MOST_PIXELS = 4096 * 4096


def read(file: bytes) -> np.ndarray:
    """The pixels of one file, row by row."""
    # Formats by name: other decoders are for files that no client means to send.
    with Image.open(io.BytesIO(file), formats=["PNG", "JPEG"]) as image:
        if image.width * image.height > MOST_PIXELS:
            # Known before anything is decoded: a small file may hold very many pixels.
            raise ValueError(f"{image.width}x{image.height} pixels are too many")
        grey = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return (255 - np.asarray(grey, np.float32).ravel()) * (INK / 255)


def refusal(text: str) -> pb_utils.InferenceResponse:
    # Returned and not raised: an exception would fail every request of the batch.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))


class TritonPythonModel:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        files = pb_utils.get_input_tensor_by_name(request, "file").as_numpy()
        try:
            images = [read(file) for file in files[:, 0]]
        except UnidentifiedImageError:
            return refusal("'file' is neither a PNG nor a JPEG image")
        except (OSError, SyntaxError, ValueError) as error:
            return refusal(f"'file' can't be decoded: {error}")
        pixels = np.array(images, np.float32).reshape(-1, SIDE * SIDE)
        return pb_utils.InferenceResponse([pb_utils.Tensor("image", pixels)])
