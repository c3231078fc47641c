"""Stands for an engine with continuous batching: each step adds a token to all running streams."""

import asyncio
import json
from itertools import count

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """A decoupled model; the engine's steps run on the event loop of `execute`."""

    def initialize(self, args):
        """Reads the pace."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._pace_s = int(parameters["PACE_MS"]["string_value"]) / 1000
        self._streams = set()
        self._engine = None

    async def execute(self, requests):
        """Streams words to each request."""
        await asyncio.gather(*[self._stream(request) for request in requests])

    async def _stream(self, request):
        tokens = int(pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy().reshape(-1)[0])
        sender = request.get_response_sender()
        words = asyncio.Queue()
        self._streams.add(words)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.ensure_future(self._run())
        for _ in range(tokens):
            word = await words.get()
            if request.is_cancelled():
                break
            output = pb_utils.Tensor("text_output", np.array([word], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([output]))
        self._streams.discard(words)
        sender.send(flags=FINAL)

    async def _run(self):
        loop = asyncio.get_running_loop()
        step = loop.time()
        for number in count():
            if not self._streams:
                return
            for words in self._streams:
                words.put_nowait(b" word%d" % (number % 10))
            step += self._pace_s
            await asyncio.sleep(max(step - loop.time(), 0))
