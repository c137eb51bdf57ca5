"""Owns encoding and decoding through the `tokenizers` library, control tokens kept apart from text.
It knows nothing of chat templates, requests or the files a definition came from.
"""

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.token_bytes import ByteRule, TextStream, byte_rule
from firstlight.inputs.tokenizer_files import TokenizerFiles, named_tokens, token_text


class ControlSpan(NamedTuple):
    """A control token found in a text: characters [start, end) became token `token_id`."""

    start: int
    end: int
    token_id: int


class TokenStream:
    """Detokenises ids one by one; text comes out as soon as its characters are whole."""

    def __init__(
        self, tokenizer: "BackendTokenizer", *, skip_special: bool, at_start: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._text = TextStream(tokenizer.rule, at_start=at_start)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; a skipped special token gives none."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        return self._text.push(self._tokenizer.token_string(token_id))

    def finish(self) -> str:
        """The replacement character of a last incomplete character, or nothing."""
        return self._text.finish()


class BackendTokenizer:
    """A tokenizer of the `tokenizers` library; immutable, safe to use from several threads.

    Control tokens are those that are special, those written `<|...|>`, and what `with_controls`
    adds. Other added tokens are words of the vocabulary and match in any text.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        controls: Collection[str] = (),
        backend: Backend | None = None,
    ) -> None:
        self._files = files
        self._backend = _build(files.definition, files.origin) if backend is None else backend
        if backend is None:
            _follow_flags(self._backend, files.config, files.definition)
        self.rule: ByteRule = byte_rule(files.definition.get("decoder"), str(files.origin))
        entries: Sequence[Mapping[str, Any]] = files.definition["added_tokens"]
        self.added_tokens: Mapping[str, int] = MappingProxyType(
            {entry["content"]: entry["id"] for entry in entries}
        )
        self.specials: Mapping[str, int] = MappingProxyType(
            {entry["content"]: entry["id"] for entry in entries if entry.get("special")}
        )
        self.special_ids = frozenset(self.specials.values())
        self.controls: Mapping[str, int] = MappingProxyType(
            {
                text: token_id
                for text, token_id in self.added_tokens.items()
                if text in self.specials or text in controls or _looks_like_control(text)
            }
        )
        self._control_texts = {token_id: text for text, token_id in self.controls.items()}
        self._hidden_names = _hidden_names(self.controls)
        self._hidden = _build(_hide(files.definition, self._hidden_names), files.origin)
        self._splitter = _build(_splitting_only(files.definition), files.origin)

    @property
    def origin(self) -> Path:
        """The folder or file this tokenizer was read from."""
        return self._files.origin

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Chat templates by name, as found beside the tokenizer."""
        return self._files.chat_templates

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        largest = max(self.added_tokens.values(), default=-1)
        return max(self._backend.get_vocab_size(with_added_tokens=False), largest + 1)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._named_id("bos_token")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the tokenizer's own files say."""
        listed = self._files.config.get("firstlight_eos_ids") or ()
        named = self._named_id("eos_token")
        return tuple(dict.fromkeys([*([] if named is None else [named]), *listed]))

    @property
    def named_specials(self) -> dict[str, str]:
        """The texts of bos_token, eos_token and their like that the files set."""
        return named_tokens(self._files.config)

    def with_controls(self, texts: Collection[str]) -> "BackendTokenizer":
        """The same tokenizer, with these added tokens kept out of plain text too."""
        if all(text in self.controls for text in texts if text in self.added_tokens):
            return self
        return BackendTokenizer(self._files, controls=frozenset(texts), backend=self._backend)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`; `add_special` puts bos and eos as the model's tokenizer does.

        Raises RequestError when the text holds half of a surrogate pair.
        """
        return list(_encode(self._backend, text, add_special).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` with control token strings spelled out: never a control token."""
        return self.encode_parts([text])

    def find_controls(self, text: str) -> list[ControlSpan]:
        """Where control tokens stand in `text` when it is encoded as ordinary text."""
        encoding = _encode(self._splitter, text, False)
        found = []
        for index, content in enumerate(encoding.tokens):
            start, end = encoding.token_to_chars(index) or (0, 0)
            if content in self.controls and content in text[start:end]:
                found.append(ControlSpan(start, end, self.controls[content]))
        return found

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Encodes strings and control token ids as one text.

        A string never yields a control token, an id is that token; the text around is cut and
        prefixed exactly as if the control token had been written in it.
        """
        listed = list(parts)
        names = {self.controls[text]: name for text, name in self._hidden_names.items()}
        joined = "".join(part if isinstance(part, str) else names[part] for part in listed)
        ids = list(_encode(self._hidden, joined, False).ids)
        unknown = self._named_id("unk_token")
        wanted = [part for part in listed if isinstance(part, int) and part != unknown]
        if [i for i in ids if i in self._control_texts and i != unknown] != wanted:
            raise RequestError("the text cannot be encoded without producing a control token")
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of a whole sequence, with bytes that are no UTF-8 replaced."""
        stream = self.stream(skip_special=skip_special, at_start=True)
        return "".join([*(stream.push(token_id) for token_id in token_ids), stream.finish()])

    def stream(self, *, skip_special: bool = True, at_start: bool = False) -> TokenStream:
        """A detokeniser for ids that arrive over time.

        `at_start` drops the space that sentencepiece vocabularies put before a text's first word;
        leave it off for text that continues a prompt.
        """
        return TokenStream(self, skip_special=skip_special, at_start=at_start)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; none for ids outside the vocabulary."""
        return self.rule.to_bytes(self.token_string(token_id))

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; empty for ids outside the vocabulary."""
        if not 0 <= token_id < 2**32:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def export_hf(self, directory: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat templates into `directory`."""
        definition = json.loads(self._backend.to_str())
        exported = TokenizerFiles(
            self.origin, definition, self._files.config, self._files.chat_templates
        )
        exported.export_hf(directory)

    def _named_id(self, name: str) -> int | None:
        text = token_text(self._files.config.get(name))
        return None if text is None else self._backend.token_to_id(text)


def _build(definition: Mapping[str, Any], origin: Path) -> Backend:
    try:
        backend = Backend.from_str(json.dumps(definition, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{origin}: the tokenizer cannot be built: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _encode(backend: Backend, text: str, add_special: bool) -> Any:
    try:
        return backend.encode(text, add_special_tokens=add_special)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError(
            "the text holds half of a surrogate pair (a broken \\ud800 escape) and is no Unicode"
        ) from error


def _follow_flags(
    backend: Backend, config: Mapping[str, Any], definition: Mapping[str, Any]
) -> None:
    """add_bos_token and add_eos_token, where given, decide what `encode` adds."""
    from tokenizers.processors import TemplateProcessing

    flags = [config.get("add_bos_token"), config.get("add_eos_token")]
    if all(flag is None for flag in flags) and definition.get("post_processor") is not None:
        return
    texts = [token_text(config.get(name)) for name in ("bos_token", "eos_token")]
    begin, end = (text if flag else None for flag, text in zip(flags, texts, strict=True))
    pieces = [*([begin] if begin else []), "$A", *([end] if end else [])]
    tokens = {text: backend.token_to_id(text) for text in (begin, end) if text}
    if None in tokens.values():
        raise ConfigError(f"bos_token or eos_token is not in the vocabulary: {tokens}")
    backend.post_processor = TemplateProcessing(
        single=pieces, pair=[*pieces, "$B:1"], special_tokens=list(tokens.items())
    )


def _looks_like_control(text: str) -> bool:
    return text.startswith(("<|", "<\uff5c")) and text.endswith(("|>", "\uff5c>"))


def _hidden_names(controls: Mapping[str, int]) -> dict[str, str]:
    """Names nobody can guess, so that no text can hold one."""
    return {text: f"\ue000{secrets.token_hex(8)}\ue001" for text in controls}


def _splitting_only(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The definition without its vocabulary: it cuts a text at added tokens and does no more."""
    rest = "\ue000rest\ue001"
    added = [{**entry, "id": index + 1} for index, entry in enumerate(definition["added_tokens"])]
    model = {"type": "WordLevel", "vocab": {rest: 0}, "unk_token": rest}
    cleared = {"pre_tokenizer": None, "post_processor": None, "decoder": None}
    return {**definition, **cleared, "added_tokens": added, "model": model}


def _hide(definition: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The definition with control tokens under other names, in the model's vocabulary too."""
    added = [
        {**entry, "content": names[entry["content"]], "normalized": False}
        if entry["content"] in names
        else entry
        for entry in definition["added_tokens"]
    ]
    model = _hide_in_model(definition["model"], names)
    return {**definition, "added_tokens": added, "model": model, "post_processor": None}


def _hide_in_model(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, Mapping):
        return {**model, "vocab": [[names.get(text, text), score] for text, score in vocabulary]}
    hidden: dict[str, Any] = {
        **model,
        "vocab": {names.get(text, text): index for text, index in vocabulary.items()},
    }
    if model.get("unk_token") in names:
        hidden["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        hidden["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    return hidden


def _touches(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
    return left + right in names or left in names or right in names
