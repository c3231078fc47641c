"""Keeps metrics of its own, which are on the server's metrics port beside the usual ones."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # The families are kept: a metric whose family is gone can't be used.
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self.texts_family = pb_utils.MetricFamily(
            "texts_total", "Texts that were measured", pb_utils.MetricFamily.COUNTER
        )
        self.longest_family = pb_utils.MetricFamily(
            "longest_text", "Characters of the longest", pb_utils.MetricFamily.GAUGE
        )
        self.sizes_family = pb_utils.MetricFamily(
            "text_characters", "Characters of a text", pb_utils.MetricFamily.HISTOGRAM
        )
        self.texts = self.texts_family.Metric(labels)
        self.longest = self.longest_family.Metric(labels)
        self.sizes = self.sizes_family.Metric(labels, buckets=[10, 100, 1000])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            lengths = np.array([len(text.decode()) for text in texts], np.int32)
            self.texts.increment(len(lengths))
            for length in lengths:
                self.sizes.observe(float(length))
            if lengths.size and lengths.max() > self.longest.value():
                self.longest.set(float(lengths.max()))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("LENGTHS", lengths)]))
        return responses
