"""Rates words: asks the model `score` for those that are no filler, and takes the mean."""

import numpy as np
import triton_python_backend_utils as pb_utils

FILLERS = {"a", "and", "is", "it", "the", "this", "was"}


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.rating(request)]) for request in requests]

    def rating(self, request):
        words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
        kept = [word for word in words if word.decode() not in FILLERS]
        call = pb_utils.InferenceRequest(
            model_name="score",
            requested_output_names=["SCORES"],
            inputs=[pb_utils.Tensor("WORDS", np.array(kept, dtype=object))],
        )
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        scores = pb_utils.get_output_tensor_by_name(answer, "SCORES").as_numpy()
        return pb_utils.Tensor("RATING", np.array([scores.mean() if len(scores) else 0], np.float32))
