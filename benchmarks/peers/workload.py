"""Owns the prompts of the serving benchmark: real text as token ids, each unlike any other.

Knows nothing of who answers them.
"""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer


class Corpus:
    """The reference texts that ship with Python as one row of token ids."""

    def __init__(self, model_folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        text = "\n\n".join(str(topics[name]) for name in sorted(topics))
        self._ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompts(self, count: int, length: int, salt: str) -> list[list[int]]:
        """`count` slices of `length` tokens whose beginnings all differ, also between salts."""
        source = random.Random(salt)
        starts = source.sample(range(len(self._ids) - length), count)
        return [self._ids[start : start + length] for start in starts]
