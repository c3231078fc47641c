"""Language models for tests, without an engine: a text model, and one whose requests name its deltas.

`words` takes a prompt and answers with its words, one a response. A prompt of commands does more:

    =============  ===========================================================
    ``fail``       fails at once
    ``break``      fails after two words
    ``endless``    answers until it is cancelled
    ``flood``      the same without pauses, in pieces of 4 KB
    =============  ===========================================================

`native` takes bodies, too, and answers with their ``pieces``, with ``status`` and ``type``; with ``flood``
it goes on until it is cancelled.

`sees` takes pictures beside the prompt, and answers with their number and their base64.

`told` takes bodies. It sends the lists of deltas that the last message, or the prompt, has as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.servers import write_model

_WORDS = """
import json
import time
import uuid
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def text(word):
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([word.encode()], object))])


class TritonPythonModel:
    def initialize(self, args):
        self.directory = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0].decode()
            try:
                for word in self.words(prompt, request, sender):
                    sender.send(text(word))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except ValueError as error:
                failed = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
                sender.send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def words(self, prompt, request, sender):
        command = prompt.rpartition(" ")[2]
        if command == "fail":
            raise ValueError("the engine is on fire")
        if command == "break":
            yield "one "
            yield "two "
            raise ValueError("the engine is on fire")
        if command in ("endless", "flood"):
            marker = self.directory / f"running-{uuid.uuid4()}"
            marker.touch()
            try:
                while not sender.is_cancelled():
                    yield "x" * 4096 if command == "flood" else "tick "
                    if command == "endless":
                        time.sleep(0.002)
            finally:
                marker.unlink()
        else:
            limit = json.loads(request.parameters() or "{}").get("max_tokens") or 1000
            for word in prompt.split(" ")[: int(limit)]:
                yield word + " "
"""
_TOLD = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            body = json.loads(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0])
            told = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            for step in json.loads(told):
                content = np.array([json.dumps(step).encode()], object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", content)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_VECTORS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            body = json.loads(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0])
            if "documents" in body:
                answer = {"scores": [len(each) / 8 for each in body["documents"]], "prompt_tokens": 5}
            else:
                given = body["input"] if isinstance(body["input"], list) else [body["input"]]
                answer = {"data": [[len(each), 0.5] for each in given], "prompt_tokens": None}
            content = pb_utils.Tensor("text_output", np.array([json.dumps(answer).encode()], object))
            sender = request.get_response_sender()
            sender.send(
                pb_utils.InferenceResponse([content]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
"""
_NATIVE = """
import json
import uuid
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.directory = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            body = json.loads(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0])
            head = {"http_status": body.get("status", 200), "content_type": body["type"]}
            for piece in self.pieces(body, sender):
                content = pb_utils.Tensor("text_output", np.array([piece.encode()], object))
                sender.send(pb_utils.InferenceResponse([content], parameters=head))
                head = {}
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def pieces(self, body, sender):
        yield from body.get("pieces", ())
        if body.get("flood"):
            marker = self.directory / f"running-{uuid.uuid4()}"
            marker.touch()
            while not sender.is_cancelled():
                yield "data: " + "x" * 4096 + chr(10) * 2
            marker.unlink()
"""
_SEES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            images = pb_utils.get_input_tensor_by_name(request, "image").as_numpy().ravel()
            said = f"{len(images)} picture {images[0].decode()}"
            sender = request.get_response_sender()
            text = pb_utils.Tensor("text_output", np.array([said.encode()], object))
            sender.send(pb_utils.InferenceResponse([text]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """
    backend: "python"
    input {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }}
    output {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }}
    model_transaction_policy {{ decoupled: true }}
    instance_group {{ kind: KIND_CPU count: {count} }}
    {extra}
"""


TINY_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture of one pixel, in base64."""
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "you": 2}, "unk_token": "[UNK]"},
}
"""A tokenizer.json with two words."""


def parameter(key: str, value: str) -> str:
    """A parameter of a model's config."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def write_words(repository: Path, name: str = "words", **parameters: str) -> Path:
    """Writes the text model; parameters of its config by key."""
    extra = "".join(parameter(key, value) for key, value in parameters.items())
    files = {
        "model.py": _WORDS,
        "chat_template.jinja": "{{ messages[-1].content }}",
        "tokenizer.json": json.dumps(TOKENIZER),
    }
    return write_model(repository, name, _CONFIG.format(count=4, extra=extra), files)


def running(repository: Path, name: str = "words") -> int:
    """Number of endless answers of the text model now."""
    return len(list((repository / name).glob("running-*")))


def write_sees(repository: Path, name: str = "sees") -> Path:
    """Writes the text model that takes pictures."""
    extra = 'input { name: "image" data_type: TYPE_STRING dims: [ -1 ] }'
    template = "{% for part in messages[-1].content %}{{ part.text }}{% endfor %}"
    files = {"model.py": _SEES, "chat_template.jinja": template}
    return write_model(repository, name, _CONFIG.format(count=1, extra=extra), files)


def write_vectors(repository: Path, name: str = "vectors") -> Path:
    """Writes a model whose vectors and scores have the lengths of texts."""
    config = _CONFIG.format(count=1, extra=parameter("CONCH_LLM", "embed,score"))
    return write_model(repository, name, config, {"model.py": _VECTORS})


def write_native(repository: Path, name: str = "native") -> Path:
    """Writes the model that answers in pieces of a body."""
    config = _CONFIG.format(count=2, extra=parameter("CONCH_LLM", "native"))
    return write_model(repository, name, config, {"model.py": _NATIVE})


def write_told(repository: Path, name: str = "told", **parameters: str) -> Path:
    """Writes the model whose requests name its deltas."""
    given: dict[str, Any] = {"CONCH_LLM": "chat,complete", **parameters}
    extra = "".join(parameter(key, value) for key, value in given.items())
    return write_model(repository, name, _CONFIG.format(count=2, extra=extra), {"model.py": _TOLD})
