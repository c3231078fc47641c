"""Upper-cases text and counts its characters.

There is no config.pbtxt beside this model: `auto_complete_config` supplies the configuration.
"""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config = auto_complete_model_config
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "upper", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "length", "data_type": "TYPE_INT32", "dims": [-1]})
        return config

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        raw = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        try:
            # Elements arrive as bytes. A length in bytes would be wrong for anything but ASCII.
            texts = [element.decode("utf-8") for element in raw.flat]
        except UnicodeDecodeError as error:
            # Returned and not raised: an exception would fail every request of the batch.
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"'text' is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        upper = np.array([text.upper().encode("utf-8") for text in texts], dtype=np.object_)
        length = np.array([len(text) for text in texts], dtype=np.int32)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("upper", upper.reshape(raw.shape)),
                pb_utils.Tensor("length", length.reshape(raw.shape)),
            ]
        )
