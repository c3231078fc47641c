"""Splits a text into words in lower case."""

import re

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.words(request)]) for request in requests]

    def words(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        return pb_utils.Tensor("WORDS", np.array(re.findall(r"\w+", text.lower()), dtype=object))
