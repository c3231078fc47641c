"""A model whose cost is per batch: what dynamic batching is for."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Identity that takes 5 ms per batch, whatever its size."""

    def execute(self, requests):
        """Run one batch."""
        time.sleep(0.005)
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", values)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
