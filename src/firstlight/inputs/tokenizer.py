"""Owns what the rest of firstlight may ask of a tokenizer, and finding one in a model folder.
It knows nothing of how a vocabulary is stored or applied.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from firstlight.inputs.backend_tokenizer import BackendTokenizer, ControlSpan
from firstlight.inputs.tiktoken_files import has_tiktoken_files, read_tiktoken_files
from firstlight.inputs.tiktoken_tokenizer import TiktokenTokenizer
from firstlight.inputs.tokenizer_sources import read_tokenizer_files


class Detokenizer(Protocol):
    """Turns ids that arrive one by one into text."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens come."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back; pure, and safe to call from any thread.

    `controls` are the added tokens that text given by users must never become; `specials` are the
    tokens `skip_special` leaves out.
    """

    @property
    def specials(self) -> Mapping[str, int]: ...
    @property
    def controls(self) -> Mapping[str, int]: ...
    @property
    def added_tokens(self) -> Mapping[str, int]: ...
    @property
    def named_specials(self) -> Mapping[str, str]: ...
    @property
    def chat_templates(self) -> Mapping[str, str]: ...
    @property
    def origin(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ordinary text, control tokens in it recognised."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Text in which no control token is recognised."""
        ...

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Plain strings and control token ids, encoded as one text or, where the model was trained
        so, each string on its own."""
        ...

    def find_controls(self, text: str) -> list[ControlSpan]:
        """The places of control tokens in a text encoded as ordinary text."""
        ...

    def with_controls(self, texts: Collection[str]) -> "Tokenizer":
        """The same tokenizer with more added tokens counted as control tokens."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of a whole sequence."""
        ...

    def stream(self, *, skip_special: bool = True, at_start: bool = False) -> Detokenizer:
        """A detokeniser for ids that arrive over time."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Writes the tokenizer in the form its kind is published in, with its chat templates."""
        ...


def load_tokenizer(directory: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder, or of a GGUF file given itself.

    A tiktoken.model of the class this program knows is preferred, then tokenizer.json, then
    tokenizer.model, then the folder's only GGUF file. Raises ConfigError naming the file when none
    is there or one is damaged or of an unknown kind.
    """
    if has_tiktoken_files(directory):
        return TiktokenTokenizer(read_tiktoken_files(directory))
    return BackendTokenizer(read_tokenizer_files(directory))
