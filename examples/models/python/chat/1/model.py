"""Chats without a language model: gives the words of the last message back, in the order of the alphabet."""

import asyncio

from conch_llm import Delta


class TritonPythonModel:
    async def chat(self, request):
        words = sorted(request.messages[-1]["content"].split())
        yield Delta(prompt_tokens=len(words))
        for word in words:
            await asyncio.sleep(0.001)  # a model computes here, and other requests go on
            yield Delta(word + " ", tokens=1)

    def embed(self, inputs, request):
        rows = [[len(text), len(text.split())] for text in inputs]
        return rows, [len(text.split()) for text in inputs]
