"""Owns how the byte-level vocabularies named in GGUF files cut text before merging.
It knows nothing of vocabularies, merges or files.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from firstlight.errors import ConfigError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = (
    _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


class PreTokenizer(NamedTuple):
    """Patterns applied one after the other, each cutting what the one before left.

    `ignore_merges` takes a whole word that is in the vocabulary as one token; `add_bos` is what
    files that do not say mean.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def definition(self) -> dict[str, Any]:
        """The pre-tokeniser as it stands in a tokenizer.json."""
        splits: Sequence[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


_FAMILIES: Mapping[PreTokenizer, str] = MappingProxyType(
    {
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
        PreTokenizer(
            (_GPT2,)
        ): "gpt-2 phi-2 mpt olmo jais trillion gigachat exaone4 a.x-4.0 mellum",
        PreTokenizer((r"\p{N}", _GPT2)): (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
        ),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
        ),
        PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
        PreTokenizer((_QWEN2,)): (
            "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"
        ),
        PreTokenizer((_QWEN35,)): "qwen35",
        PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
        PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer(
            (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)
        ): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")
        ): "deepseek-coder",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    }
)
_BY_NAME: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: entry for entry, names in _FAMILIES.items() for name in names.split()}
)


def pre_tokenizer_named(name: str, origin: str) -> PreTokenizer:
    """The pre-tokeniser a GGUF file calls `name`; `origin` is the file, for the message.

    Raises ConfigError for a name that is not known, with the names that are.
    """
    if name not in _BY_NAME:
        raise ConfigError(
            f"{origin}: tokenizer.ggml.pre is {name!r}, a pre-tokeniser that is not known here; "
            f"known: {', '.join(sorted(_BY_NAME))}. Put the model's tokenizer.json beside the "
            "weights and it is used instead"
        )
    return _BY_NAME[name]
