"""Python models with methods for text, and requests to them by OpenAI's routes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.support.servers import write_model

import conch.testing
from conch_llm.deltas import Delta, decode_deltas

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def text_model(root: Path, body: str, name: str = "m", config: str | None = 'backend: "python"') -> Path:
    """Writes a model whose class has this body."""
    methods = textwrap.indent(textwrap.dedent(body), "    ")
    source = (
        "import asyncio\nimport logging\nimport threading\n\nimport conch\nfrom conch_llm import Delta\n\n"
    )
    return write_model(root, name, config, {"model.py": f"{source}class TritonPythonModel:\n{methods}"})


def python_config(**parameters: str) -> str:
    """The config of a Python model with these parameters."""
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    ]
    return "\n".join(['backend: "python"', *lines])


def conversation(text: str = "a b c", **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], **more}


def asked(route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `LoadedModel.run` for a body."""
    return {"inputs": {"text_input": [json.dumps(body)]}, "parameters": {"openai_route": route}}


def deltas(model: conch.testing.LoadedModel, route: str, body: dict[str, Any]) -> list[Delta]:
    """All deltas of an answer."""
    responses = model.run(**asked(route, body))
    return [delta for each in responses for delta in decode_deltas(each["text_output"][0])]


def choices(found: list[Delta]) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for delta in found:
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    return texts
