"""Finds the GGUF file of a version directory, and the model's own sampling parameters beside it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_engines.language.gguf_file import Texts, read_metadata
from conch_engines.language.json_files import own_sampling

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_KEEPING = ("gpt2", "llama")
"""Tokenizers that drop no parts of texts, such as blanks or accents."""


@dataclass(frozen=True, slots=True)
class LlamaFile:
    """A model on disk.

    Attributes:
        path: The file; the first of several parts.
        metadata: Its values by key; arrays of numbers are None.
        sampling: The model's own sampling parameters, as of `own_sampling`.
    """

    path: Path
    metadata: Mapping[str, Any]
    sampling: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The name of its architecture, such as ``llama``."""
        return str(self.metadata.get("general.architecture", ""))

    def of_architecture(self, key: str) -> Any:
        """The value of a key that begins with the architecture's name; None without one."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @property
    def context_length(self) -> int | None:
        """Tokens of the context with which the model was trained."""
        found = self.of_architecture("context_length")
        return found if isinstance(found, int) else None

    @property
    def chat_template(self) -> str:
        """Its chat template; empty without one."""
        found = self.metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else ""

    def check_size(self, name: str, text: str, tokens: int) -> None:
        """Raises InvalidArgumentError: a text has more than so many tokens, whatever they are.

        So a text that is far too long takes no time of the tokenizer.
        """
        vocabulary = self.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(vocabulary, Texts) or self.metadata.get("tokenizer.ggml.model") not in _KEEPING:
            return
        longest = max(vocabulary.longest, 1)
        if len(text) > tokens and len(data := text.encode(errors="replace")) > tokens * longest:
            raise InvalidArgumentError(
                f"This model's maximum context length is {tokens} tokens. However, your {name} contains at "
                f"least {-(-len(data) // longest)} tokens. Please shorten the {name.partition('[')[0]}."
            )


def find_model(directory: Path, name: str, file: str = "", others: Collection[Path] = ()) -> LlamaFile:
    """The model in a version directory.

    Args:
        directory: The directory.
        name: The model's name.
        file: The config's ``default_model_filename``; empty for the only GGUF file.
        others: Files that are something else, such as adapters.

    Raises:
        UnavailableError: There is none.
        InvalidArgumentError: There are several, or a file is missing or malformed.
    """
    found = sorted(each for each in directory.glob("*.gguf") if each not in others)
    if file:
        found = [directory / file] if (directory / file).is_file() else []
    if not found:
        wanted = directory / (file or "model.gguf")
        raise UnavailableError(
            f"unable to find '{wanted}' for model '{name}': the version directory holds one GGUF file, or "
            f"all parts of one"
        )
    path = _first_part(found, name)
    if path is None:
        names = ", ".join(each.name for each in found)
        raise InvalidArgumentError(f"model '{name}': one GGUF file is expected, there are {names}")
    try:
        metadata = read_metadata(path)
    except ValueError as error:
        raise InvalidArgumentError(f"model '{name}': '{path}' is no GGUF file: {error}") from None
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise InvalidArgumentError(f"model '{name}': '{path}' is no model, its general.type is {kind!r}")
    return LlamaFile(path, metadata, own_sampling(directory, name, metadata))


def all_parts(path: Path) -> list[Path]:
    """The parts of a model that one of its files belongs to."""
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem = path.name[: part.start()]
    return [path.with_name(f"{stem}-{number:05}-of-{part[2]}.gguf") for number in range(1, int(part[2]) + 1)]


def _first_part(found: list[Path], name: str) -> Path | None:
    """The only file, or the first of parts that are all there."""
    part = _PART.search(found[0].name)
    if part is None:
        return found[0] if len(found) == 1 else None
    wanted = all_parts(found[0])
    missing = ", ".join(each.name for each in wanted if not each.is_file())
    if missing:
        raise InvalidArgumentError(f"model '{name}': '{found[0].parent}' lacks {missing}")
    return wanted[0] if set(found) <= set(wanted) else None
