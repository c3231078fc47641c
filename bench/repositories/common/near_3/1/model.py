"""Identity, written as the Python backend's documentation shows it: one response per request, no tricks."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers every request with its own input."""

    def execute(self, requests):
        """Run one batch."""
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", values)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
