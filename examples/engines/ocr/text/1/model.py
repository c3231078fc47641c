"""Turns the recogniser's chances of characters into text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

BLANK = 0
LEAST_SCORE = 0.5


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # `prepare.py` writes the file from the network's metadata.
        file = Path(__file__).with_name("characters.txt")
        self.characters = ["", *file.read_text("utf-8").split("\n"), " "]

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        chances = pb_utils.get_input_tensor_by_name(request, "chances").as_numpy()
        boxes = pb_utils.get_input_tensor_by_name(request, "boxes").as_numpy()
        # Without boxes there is one line, a blank one.
        lines = [self._decode(line) for line in chances[: len(boxes)]]
        kept = [number for number, (_, score) in enumerate(lines) if score >= LEAST_SCORE]
        outputs = {
            "text": np.array([lines[number][0].encode() for number in kept], np.object_),
            "box": boxes[kept],
            "score": np.array([lines[number][1] for number in kept], np.float32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()])

    def _decode(self, chances: np.ndarray) -> tuple[str, float]:
        """The likeliest characters, without repetitions and blanks (CTC), and their mean chance."""
        likeliest = chances.argmax(1)
        # A character that occurs twice in a row has a blank between.
        kept = np.diff(likeliest, prepend=BLANK) != 0
        kept &= likeliest != BLANK
        if not kept.any():
            return "", 0.0
        text = "".join(self.characters[number] for number in likeliest[kept])
        return text, float(chances.max(1)[kept].mean())
