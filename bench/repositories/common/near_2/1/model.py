"""Asks the next model of the chain, and answers with what that says and one more."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One link of a chain of calls."""

    def execute(self, requests):
        """Run one batch."""
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="near_3", requested_output_names=["OUTPUT0"], inputs=request.inputs()
            )
            answer = call.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            values = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", values + 1)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
