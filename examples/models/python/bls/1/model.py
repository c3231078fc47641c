"""Sends its inputs on to the model that the request names, and answers with what that says."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

OUTPUTS = ["OUTPUT0", "OUTPUT1"]


class TritonPythonModel:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        named = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()
        inputs = [tensor for tensor in request.inputs() if tensor.name() != "MODEL_NAME"]
        call = pb_utils.InferenceRequest(
            model_name=named[0].decode(), requested_output_names=OUTPUTS, inputs=inputs
        )
        answer = call.exec()
        if answer.has_error():
            # For this request only; the others of the batch get their answers.
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse(answer.output_tensors())
