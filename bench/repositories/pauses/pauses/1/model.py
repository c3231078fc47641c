"""Stands for models that think for long: a word at once, and another one every so many seconds."""

import asyncio


class TritonPythonModel:
    """The prompt is the number of seconds."""

    async def complete(self, request):
        """Answers until the client leaves."""
        yield "word "
        while True:
            await asyncio.sleep(float(request.prompt))
            yield "word "
