"""A model without a config.pbtxt: it says by itself what it takes, gives, and that it may be batched."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "WORDS", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            try:
                counts = [len(text.decode().split()) for text in texts.ravel()]
            except UnicodeDecodeError as error:
                refusal = pb_utils.TritonError(
                    f"TEXT is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG
                )
                responses.append(pb_utils.InferenceResponse(error=refusal))
            else:
                words = pb_utils.Tensor("WORDS", np.array(counts, np.int32).reshape(texts.shape))
                responses.append(pb_utils.InferenceResponse([words]))
        return responses
