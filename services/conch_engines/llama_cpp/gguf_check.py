"""Describes GGUF files for `conch check`: their contents, the memory that they take, what does not load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import ConchError
from conch.core.file_checks import FileFinding
from conch_engines.language.gguf_tensors import Tensor, read_tensors
from conch_engines.llama_cpp.llama_file import LlamaFile, all_parts, find_model
from conch_engines.llama_cpp.llama_settings import LlamaSettings
from conch_engines.llama_cpp.llama_tasks import GENERATE, find_task
from conch_engines.model_config import parameter_texts
from conch_llm.language.tool_calls import parser_of_template

_BACKEND = "llama_cpp"
_MB = 1_000_000
_HALF = 2  # bytes of a number in the cache


def check_gguf(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    """Checks a version of the backend llama_cpp; the load's own errors are left to it."""
    if config["backend"] != _BACKEND:
        return
    texts = parameter_texts(config)
    try:
        settings = LlamaSettings.of(texts)
        others = settings.lora_paths(version_directory).values()
        named = config.get("default_model_filename", "")
        file = find_model(version_directory, config["name"], named, others)
        longest = settings.context_length(file.context_length)
        task = find_task(file, texts)
    except ConchError:
        return
    tensors: list[Tensor] = []
    try:
        for part in all_parts(file.path):
            found = read_tensors(part)[1]
            tensors += found
            yield from _faults(found, part.resolve())
    except ValueError as error:
        yield FileFinding("error", f"it is no GGUF file: {error}", file.path.resolve())
        return
    path, slots = file.path.resolve(), settings.max_num_seqs
    yield FileFinding("note", _content(file, tensors), path)
    if task == GENERATE:
        yield FileFinding("note", _template(file), path)
    cached = longest * slots if task == GENERATE else 0
    trained = file.context_length or "an unknown number of"
    yield FileFinding(
        "note",
        f"a request may have {longest} tokens, prompt and answer together (trained with {trained}), and "
        f"{slots} run at a time; memory: {_memory(file, tensors, cached)}",
        path,
    )


def _faults(tensors: list[Tensor], path: Path) -> Iterator[FileFinding]:
    """Errors of tensors that can't be loaded; all that lie behind the end of a cut file are one."""
    cut = [each for each in tensors if each.cut]
    for each in tensors:
        if each.fault and (not each.cut or each is cut[0]):
            more = f"; {len(cut) - 1} tensors more are cut" if each.cut and len(cut) > 1 else ""
            yield FileFinding("error", f"tensor '{each.name}' can't be loaded: {each.fault}{more}", path)


def _content(file: LlamaFile, tensors: list[Tensor]) -> str:
    kinds = Counter(each.kind for each in tensors if each.kind)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    elements = sum(each.elements for each in tensors)
    return f"architecture {file.architecture}, {elements:,} parameters in {len(tensors)} tensors: {listed}"


def _template(file: LlamaFile) -> str:
    template = file.chat_template
    if not template:
        return "it has no chat template: chats need one beside it"
    parser = parser_of_template(template)
    calls = f"tool calls of the form {parser}" if parser else "no known form of tool calls"
    thinks = ", reasoning of the form think (CONCH_REASONING_PARSER)" if "<think>" in template else ""
    return f"its chat template has {calls}{thinks}"


def _memory(file: LlamaFile, tensors: list[Tensor], cached: int) -> str:
    weights = f"{sum(each.nbytes for each in tensors) / _MB:,.1f} MB of weights"
    if not cached:
        return weights
    found = [
        file.of_architecture(key)
        for key in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
    ]
    layers, width, heads, shared = found[0], found[1], found[2], found[3] or found[2]
    if not all(isinstance(each, int) and each > 0 for each in (layers, width, heads, shared)):
        return f"{weights}, and a cache of unknown size"  # layers may differ
    sizes = [file.of_architecture(f"attention.{name}_length") or width // heads for name in ("key", "value")]
    cache = cached * layers * shared * sum(sizes) * _HALF
    return f"{weights}, and {cache / _MB:,.1f} MB of cache"
