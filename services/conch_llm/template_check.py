"""Checks chat templates, for `conch check`: those of no use, and how tool calls are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import ConchError, UnavailableError
from conch.core.file_checks import FileFinding
from conch_llm.language.chat_template import load_chat_template
from conch_llm.models.answer_parsers import TOOL_PARSER

_OWN_PARSERS = ("vllm",)
"""Backends whose engine reads tool calls by itself."""


def check_templates(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    """Checks the chat template of a version, if it has one in its files."""
    parameters = {
        name: str(value.get("string_value", "")) for name, value in config.get("parameters", {}).items()
    }
    if config["backend"] in _OWN_PARSERS:
        return
    try:
        template = load_chat_template(
            version_directory,
            chat_template=parameters.get("chat_template", ""),
            tokenizer=parameters.get("tokenizer", ""),
        )
    except UnavailableError as error:
        yield FileFinding("note", f"the chat template is not checked: {error.message}", version_directory)
        return
    except ConchError as error:
        yield FileFinding("warning", f"no chat can be answered: {error.message}", version_directory)
        return
    if template is None or parameters.get(TOOL_PARSER):
        return
    if template.tool_parser:
        said = f"tool calls are read as {template.tool_parser}, by the chat template"
        yield FileFinding("note", said, version_directory)
    elif template.takes_tools:
        said = (
            f"the chat template takes tools and writes calls in no known way: without the parameter "
            f'{TOOL_PARSER} a request with "auto" tool choice is refused'
        )
        yield FileFinding("note", said, version_directory)
