"""Asks the next model of the chain, and answers with what that says and one more."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One link of a chain of calls."""

    def initialize(self, args):
        """Finds out who is next: chain_2 after chain_1."""
        chain, number = args["model_name"].split("_")
        self.next = f"{chain}_{int(number) + 1}"

    def execute(self, requests):
        """Run one batch."""
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name=self.next, requested_output_names=["OUTPUT0"], inputs=request.inputs()
            )
            answer = call.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            values = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", values + 1)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
