"""Image files to what a vision model takes: 224x224 pixels in colour, normalised, channels first.

Its config says by what means and deviations of the channels. A file that is no image fails its own request
only.
"""

from __future__ import annotations

import io
import json

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

SIDE = 224


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self.mean, self.deviation = (
            np.array(parameters[key]["string_value"].split(","), np.float32).reshape(3, 1, 1)
            for key in ("mean", "deviation")
        )

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().ravel()
            try:
                pixels = np.stack([self.pixels(file) for file in files])
            except Exception as error:  # decoders say in many ways that they can't read what a client sent
                refusal = pb_utils.TritonError(
                    f"IMAGE is no image: {error}", pb_utils.TritonError.INVALID_ARG
                )
                responses.append(pb_utils.InferenceResponse(error=refusal))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels)]))
        return responses

    def pixels(self, file: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(file)).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        channels = np.asarray(image, np.float32).transpose(2, 0, 1) / 255
        return (channels - self.mean) / self.deviation
