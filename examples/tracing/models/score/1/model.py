"""Scores words by a table; a word that is not in it has 0."""

import numpy as np
import triton_python_backend_utils as pb_utils

TABLE = {"bad": -1, "boring": -1, "good": 1, "great": 2, "lovely": 2, "terrible": -2}


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.scores(request)]) for request in requests]

    def scores(self, request):
        words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
        scores = [TABLE.get(word.decode(), 0) for word in words]
        return pb_utils.Tensor("SCORES", np.array(scores, np.float32))
