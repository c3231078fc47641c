"""Writes text word by word, each word chosen by the one before it, as in the text it has learned from.

A stand-in for a language model: a request has as many responses as there are words.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

DEFAULT_WORDS = 20
MOST_WORDS = 1000


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        words = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8").split()
        self._following: dict[str, list[str]] = {}
        for word, following in pairwise(words):
            self._following.setdefault(word, []).append(following)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._write(request, sender)
            except ValueError as error:
                refusal = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=refusal))
            # The last response may have been sent already: that there are no more is said apart.
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _write(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        word = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy()[0].decode("utf-8")
        if word not in self._following:
            known = ", ".join(sorted(self._following, key=str.lower)[:10])
            raise ValueError(f"'prompt' must be a word of the text, such as {known}; got '{word}'")
        count = number(request, "max_words", DEFAULT_WORDS)
        if not 0 <= count <= MOST_WORDS:
            raise ValueError(f"'max_words' must be from 0 to {MOST_WORDS}, got {count}")
        choose = random.Random(number(request, "seed", 0))
        for _ in range(count):
            if word not in self._following or request.is_cancelled():
                return
            word = choose.choice(self._following[word])
            tensor = pb_utils.Tensor("word", np.array([word.encode("utf-8")], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([tensor]))


def number(request: pb_utils.InferenceRequest, name: str, default: int) -> int:
    """An optional input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else int(tensor.as_numpy()[0])
