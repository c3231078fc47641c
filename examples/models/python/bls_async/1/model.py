"""Makes two calls at the same time: one of `add_sub` for the sum, another one for the difference."""

from __future__ import annotations

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return list(await asyncio.gather(*map(self.answer, requests)))

    async def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        calls = [
            pb_utils.InferenceRequest(
                model_name="add_sub", requested_output_names=[name], inputs=request.inputs()
            )
            for name in ("OUTPUT0", "OUTPUT1")
        ]
        answers = await asyncio.gather(*(call.async_exec() for call in calls))
        for answer in answers:
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse([answer.output_tensors()[0] for answer in answers])
