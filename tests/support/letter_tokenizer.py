"""Writes a tokenizer whose tokens are single letters as a Hugging Face folder.

Runs where transformers is installed. Arguments: the folder.
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write(folder: str) -> None:
    """Writes the tokenizer's files."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=letters[0], eos_token=letters[1])
    fast.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
