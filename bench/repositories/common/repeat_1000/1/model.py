"""Answers every request a thousand times with its own input."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A decoupled model, which sends its responses before `execute` returns."""

    def execute(self, requests):
        """Run one batch."""
        for request in requests:
            sender = request.get_response_sender()
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            for _ in range(1000):
                output = pb_utils.Tensor("OUTPUT0", values)
                sender.send(pb_utils.InferenceResponse(output_tensors=[output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
