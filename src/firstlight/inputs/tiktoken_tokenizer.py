"""Owns encoding and decoding with a tiktoken vocabulary whose special tokens stand in slots.
It knows nothing of chat formats, requests or what the special tokens mean.
"""

import codecs
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tiktoken

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.backend_tokenizer import ControlSpan
from firstlight.inputs.forced_cuts import forced_cuts
from firstlight.inputs.tiktoken_files import (
    CONFIG_FILE,
    MODEL_FILE,
    NUM_SPECIAL_SLOTS,
    TiktokenFiles,
)
from firstlight.inputs.tokenizer_files import named_tokens

_END_OF_MESSAGE = "<|end_of_msg|>"
_HEAD_LETTER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL_LETTER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = "|".join(
    [
        r"\p{Han}+",
        f"{_BEFORE_WORD}{_HEAD_LETTER}*{_TAIL_LETTER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_HEAD_LETTER}+{_TAIL_LETTER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""The pieces no merge crosses, tried in this order: the cutting of Kimi K2 and K3."""


class ByteTokenStream:
    """Detokenises ids one by one; text comes out as soon as its characters are whole."""

    def __init__(self, tokenizer: "TiktokenTokenizer", *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; a skipped special token gives none."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """The replacement character of a last incomplete character, or nothing."""
        return self._decoder.decode(b"", final=True)


class TiktokenTokenizer:
    """A tokenizer of a `tiktoken.model` file; immutable, safe to use from several threads.

    All special slots are control tokens. Of them those not flagged special (the markup of Kimi
    K3) show in decoded text. Nothing is put before or behind an encoded text.
    """

    def __init__(self, files: TiktokenFiles) -> None:
        """Builds the encoder; raises ConfigError when the library refuses the vocabulary."""
        self._files = files
        try:
            self._encoding = tiktoken.Encoding(
                str(files.origin),
                pat_str=PIECES,
                mergeable_ranks=dict(files.ranks),
                special_tokens={},
            )
        except ValueError as error:
            raise ConfigError(f"{files.origin / MODEL_FILE}: cannot be built: {error}") from error
        self._bytes: tuple[bytes, ...] = (
            *files.ranks,
            *(files.slots[index].encode() for index in sorted(files.slots)),
        )
        self.added_tokens: Mapping[str, int] = MappingProxyType(
            {text: index for index, text in files.slots.items()}
        )
        self.controls = self.added_tokens
        self.special_ids = files.special
        self.specials: Mapping[str, int] = MappingProxyType(
            {text: index for text, index in self.added_tokens.items() if index in files.special}
        )
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first)))

    @property
    def origin(self) -> Path:
        """The folder this tokenizer was read from."""
        return self._files.origin

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Chat templates by name, as found beside the tokenizer."""
        return self._files.chat_templates

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._files.ranks) + NUM_SPECIAL_SLOTS

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one; `encode` never adds it."""
        return self.added_tokens.get(self.named_specials.get("bos_token", ""))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the end of a message first, then `eos_token`."""
        texts = (_END_OF_MESSAGE, self.named_specials.get("eos_token", ""))
        return tuple(self.added_tokens[text] for text in texts if text in self.added_tokens)

    @property
    def named_specials(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token and their like that the files set."""
        return named_tokens(self._files.config)

    def with_controls(self, texts: Collection[str]) -> "TiktokenTokenizer":
        """This tokenizer: all its added tokens are control tokens already."""
        return self

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`, special tokens in it recognised; `add_special` adds nothing here.

        Raises RequestError when the text holds half of a surrogate pair.
        """
        ids: list[int] = []
        end = 0
        for span in self.find_controls(text):
            ids += [*self.encode_plain(text[end : span.start]), span.token_id]
            end = span.end
        return ids + self.encode_plain(text[end:])

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` with special token strings spelled out."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text holds half of a surrogate pair (a broken \\ud800 escape), not Unicode"
            ) from error
        ids: list[int] = []
        for start, end in forced_cuts(text):
            ids += self._encoding.encode_ordinary(text[start:end])
        return ids

    def find_controls(self, text: str) -> list[ControlSpan]:
        """Where special tokens stand in `text` when it is encoded as ordinary text."""
        return [
            ControlSpan(match.start(), match.end(), self.added_tokens[match.group()])
            for match in self._find.finditer(text)
        ]

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Encodes strings and control token ids one after the other.

        Each string is encoded on its own, as these models were trained: no merge crosses a border
        between parts, and a string never yields a control token.
        """
        return list(self._part_ids(parts))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of a whole sequence, with bytes that are no UTF-8 replaced."""
        stream = self.stream(skip_special=skip_special)
        return "".join([*(stream.push(token_id) for token_id in token_ids), stream.finish()])

    def stream(self, *, skip_special: bool = True, at_start: bool = False) -> ByteTokenStream:
        """A detokeniser for ids that arrive over time; `at_start` changes nothing here."""
        return ByteTokenStream(self, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; none for ids outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def export_hf(self, directory: Path) -> None:
        """Copies tiktoken.model, tokenizer_config.json and a chat template to `directory`.

        The Python class that transformers needs for them is not ours and not written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for name in (MODEL_FILE, CONFIG_FILE, "chat_template.jinja"):
            is_same = (directory / name).resolve() == (self.origin / name).resolve()
            if (self.origin / name).is_file() and not is_same:
                shutil.copyfile(self.origin / name, directory / name)

    def _part_ids(self, parts: Iterable[str | int]) -> Iterator[int]:
        for part in parts:
            if isinstance(part, str):
                yield from self.encode_plain(part)
            else:
                yield part
