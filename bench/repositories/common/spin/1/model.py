"""Computes for a few milliseconds in Python itself, and answers with its own input."""

import triton_python_backend_utils as pb_utils

STEPS = 80_000


class TritonPythonModel:
    """A model that gains by instances in processes of their own."""

    def execute(self, requests):
        """Run one batch."""
        responses = []
        for request in requests:
            total = 0
            for step in range(STEPS):
                total += step & 7
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", values)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
