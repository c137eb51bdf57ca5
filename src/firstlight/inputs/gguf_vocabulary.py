"""Owns how the tokenizer inside a GGUF file's metadata becomes a tokenizer definition.
It knows nothing of the tensors in the file or of how text is encoded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import GGUFReader

from firstlight.errors import ConfigError
from firstlight.inputs.gguf_pre_tokenizers import PreTokenizer, pre_tokenizer_named
from firstlight.inputs.scored_pieces import ScoredPieces, added_tokens, definition_of
from firstlight.inputs.tokenizer_files import TokenizerFiles

_PREFIX = "tokenizer."
_NAMED = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
)


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """Reads the tokenizer and the chat templates from the metadata of the GGUF file at `path`.

    Raises ConfigError when the file is no GGUF file or its tokenizer is of a kind not known here.
    """
    metadata = _Metadata(path)
    kind = metadata.text("ggml.model")
    if kind == "gpt2":
        definition, adds_bos = _byte_level(metadata)
    elif kind == "llama":
        definition, adds_bos = _sentencepiece(metadata), True
    else:
        raise ConfigError(
            f"{path}: tokenizer.ggml.model is {kind!r}; 'gpt2' (byte-level) and 'llama' "
            "(sentencepiece) can be read. Put the model's tokenizer.json beside the weights"
        )
    return TokenizerFiles(
        origin=path,
        definition=definition,
        config=MappingProxyType(_config(metadata, adds_bos)),
        chat_templates=MappingProxyType(_templates(metadata)),
    )


class _Metadata:
    """Typed look-ups in the `tokenizer.` part of the metadata, naming the file when they fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fields = GGUFReader(str(path), "r").fields
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise ConfigError(f"{path}: not a readable GGUF file: {error}") from error

    def names(self) -> list[str]:
        return [name[len(_PREFIX) :] for name in self._fields if name.startswith(_PREFIX)]

    def get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(_PREFIX + name)
        return default if field is None else field.contents()

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: tokenizer.{name} is missing or no text")
        return value

    def array(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ConfigError(
                f"{self.path}: tokenizer.{name} is missing or no array of {kind.__name__}"
            )
        if length is not None and len(value) != length:
            raise ConfigError(
                f"{self.path}: tokenizer.{name} has {len(value)} entries for {length} tokens"
            )
        return value


def _byte_level(metadata: _Metadata) -> tuple[dict[str, Any], bool]:
    tokens = metadata.array("ggml.tokens", str)
    kinds = metadata.array("ggml.token_type", int, len(tokens))
    name = metadata.get("ggml.pre", "default")
    pre_tokenizer = pre_tokenizer_named(name, str(metadata.path))
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer.definition(),
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(metadata, tokens, pre_tokenizer),
    }
    return definition, pre_tokenizer.add_bos


def _bpe(metadata: _Metadata, tokens: Sequence[str], pre_tokenizer: PreTokenizer) -> dict[str, Any]:
    merges = metadata.array("ggml.merges", str)
    pairs = [merge.split(" ", 1) for merge in merges]
    broken = next((merge for merge in merges if " " not in merge), None)
    if broken is not None:
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.merges has {broken!r}, no pair")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre_tokenizer.ignore_merges,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": pairs,
    }


def _sentencepiece(metadata: _Metadata) -> dict[str, Any]:
    tokens = metadata.array("ggml.tokens", str)
    spaced = metadata.get("ggml.add_space_prefix", True)
    return definition_of(
        ScoredPieces(
            pieces=tuple(tokens),
            scores=tuple(metadata.array("ggml.scores", float, len(tokens))),
            kinds=tuple(metadata.array("ggml.token_type", int, len(tokens))),
            prefix="first" if spaced else "never",
        )
    )


def _config(metadata: _Metadata, adds_bos: bool) -> dict[str, Any]:
    tokens: list[str] = metadata.get("ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _NAMED.items():
        token_id = metadata.get(f"ggml.{key}")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    config["add_bos_token"] = bool(metadata.get("ggml.add_bos_token", adds_bos))
    config["add_eos_token"] = bool(metadata.get("ggml.add_eos_token", False))
    ends = [metadata.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config["firstlight_eos_ids"] = sorted({end for end in ends if end is not None})
    config["clean_up_tokenization_spaces"] = False
    return config


def _templates(metadata: _Metadata) -> Mapping[str, str]:
    named = {
        name.partition("chat_template.")[2]: metadata.text(name)
        for name in metadata.names()
        if name.startswith("chat_template.")
    }
    if metadata.get("chat_template") is not None:
        named["default"] = metadata.text("chat_template")
    return named
