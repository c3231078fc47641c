"""Turns a PNG or JPEG file into the pixels that the detector reads."""

from __future__ import annotations

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, UnidentifiedImageError

MOST_PIXELS = 8192 * 8192
LONGEST_SIDE = 1280
# The detector halves its input five times.
STEP = 32


def read(file: bytes) -> tuple[np.ndarray, tuple[int, int]]:
    """Pixels of shape [1, 3, height, width] from -1 to 1, and the image's own width and height."""
    with Image.open(io.BytesIO(file), formats=["PNG", "JPEG"]) as image:
        size = image.size
        if size[0] * size[1] > MOST_PIXELS:
            # Known before anything is decoded: a small file may hold very many pixels.
            raise ValueError(f"{size[0]}x{size[1]} pixels are too many")
        # Large images are made smaller; small ones keep their size but for the step.
        scale = min(1.0, LONGEST_SIDE / max(size))
        width, height = (max(STEP, round(side * scale / STEP) * STEP) for side in size)
        colours = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(colours, np.float32).transpose(2, 0, 1)[None] / 127.5 - 1, size


def refusal(text: str) -> pb_utils.InferenceResponse:
    # Returned and not raised: the client gets the text alone, without a traceback.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))


class TritonPythonModel:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            pixels, size = read(pb_utils.get_input_tensor_by_name(request, "file").as_numpy()[0])
        except UnidentifiedImageError:
            return refusal("'file' is neither a PNG nor a JPEG image")
        except (OSError, SyntaxError, ValueError) as error:
            return refusal(f"'file' can't be decoded: {error}")
        outputs = {"pixels": pixels, "size": np.array(size, np.int32)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()])
