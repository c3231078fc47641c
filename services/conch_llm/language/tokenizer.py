"""Tokens of text models that have a ``tokenizer.json``: counts, encoding, decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_llm.language.chat_template import find_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"

_SHORT = 1024


class TextTokenizer:
    """A tokenizer of the package `tokenizers`; safe to call from several threads.

    Args:
        file: ``tokenizer.json``.

    Attributes:
        longest: Tokens to which the file says that texts are cut; None if it does not. All are encoded.
        beyond: The number after the greatest id of a token.

    Raises:
        InvalidArgumentError: The file is malformed.
        UnavailableError: tokenizers is not installed.
    """

    def __init__(self, file: Path) -> None:
        self._tokenizer = _read(file)
        cut = self._tokenizer.truncation
        self.longest: int | None = None if cut is None else cut["max_length"]
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.beyond = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        if len(text) <= _SHORT:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        # Only the method for many texts lets other threads run meanwhile.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = found.ids
        return ids

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        """The number of tokens. A rendered chat template has its special tokens already."""
        return len(self.encode(text, add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids.

        Raises:
            InvalidArgumentError: An id is no token.
        """
        self.tokens(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id's token as it is in the vocabulary.

        Raises:
            InvalidArgumentError: An id is no token.
        """
        found: list[str] = []
        for position, each in enumerate(ids):
            # Ids have 32 bits; others raise OverflowError.
            token = self._tokenizer.id_to_token(each) if 0 <= each < 1 << 32 else None
            if token is None:
                raise InvalidArgumentError(f"tokens[{position}]: {each} is no token of the model's tokenizer")
            found.append(token)
        return found


def load_tokenizer(version_directory: Path | str, *, tokenizer: str = "") -> TextTokenizer | None:
    """Reads the tokenizer of a model; None if it has no ``tokenizer.json``.

    Args:
        version_directory: Directory of the model version.
        tokenizer: The parameter of this name: a folder with the files of a tokenizer.

    Raises:
        InvalidArgumentError: The folder does not exist, or the file is malformed.
        UnavailableError: There is a file, but tokenizers is not installed.
    """
    directory = Path(version_directory)
    folder = find_path(directory, tokenizer, "tokenizer") if tokenizer else directory
    file = folder / FILE
    return TextTokenizer(file) if file.is_file() else None


def _read(file: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UnavailableError("counting tokens needs tokenizers: pip install 'conch[llm]'") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # boundary: tokenizers raises nothing more precise
        raise InvalidArgumentError(f"{file} can't be read: {error}") from None
