"""Owns making k3-mini's tokenizer: byte-level merges under which each word is one token.

It knows the file form of tiktoken vocabularies with 256 special slots, and no model.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex  # Unicode classes with intersections; tiktoken requires it

from firstlight.inputs.kimi_k3.encoder import EncoderOptions, chat_segments
from firstlight.inputs.tiktoken_files import CONFIG_FILE, MODEL_FILE, TOKENIZER_CLASS
from firstlight.inputs.tiktoken_tokenizer import PIECES
from firstlight.training.recipes.k3_mini import words

# Slots from the end of the vocabulary, as in the published model: text, and whether a decoded text
# leaves it out.
SLOTS: Mapping[int, tuple[str, bool]] = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}


def write_tokenizer(directory: Path) -> int:
    """Writes tiktoken.model and tokenizer_config.json; returns the number of merge ranks."""
    ranks = merge_ranks(pieces())
    lines = [f"{base64.b64encode(data).decode()} {rank}" for rank, data in enumerate(ranks)]
    (directory / MODEL_FILE).write_text("\n".join(lines) + "\n", encoding="ascii")
    fields = json.dumps(tokenizer_config(len(ranks)), indent=2)
    (directory / CONFIG_FILE).write_text(fields + "\n", encoding="ascii")
    return len(ranks)


def tokenizer_config(base: int) -> dict[str, Any]:
    """Returns the settings of a vocabulary of `base` ranks with the named slots behind it."""
    added = {
        str(base + slot): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": special,
        }
        for slot, (text, special) in SLOTS.items()
    }  # fmt: skip
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|end_of_msg|>"],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": TOKENIZER_CLASS,
        "unk_token": "[UNK]",
    }


def pieces() -> list[str]:
    """Returns the pieces of text that shall be one token each, without doubles."""
    cut = regex.compile(PIECES, regex.V1)
    found: dict[str, None] = {}
    for text in _texts():
        found.update(dict.fromkeys(cut.findall(text)))
    return list(found)


def _texts() -> Iterable[str]:
    numbers = [str(n) for n in range(10, words.LARGEST_NUMBER + 1)]
    yield from numbers
    yield from words.NAMES
    yield from (*words.COLOURS, *words.SHAPES, *words.PLACES, *words.CITIES, *words.SUBJECTS)
    sentences = (
        words.DIGIT, words.COLOUR, words.SHAPE, words.PLACE, words.COUNT, words.INTRODUCTION,
        *words.GREETINGS,
    )  # fmt: skip
    yield from sentences
    forms = (words.WHAT_IS, words.REVERSE, words.COUNT_WORDS, words.UPPER, words.ADD,
             words.WEATHER, words.WEATHER_ANSWER, words.WEATHER_RESULT)  # fmt: skip
    blank = dict.fromkeys(
        ("key", "words", "letters", "left", "right", "city", "degrees"), "\N{BULLET}"
    )
    # Filled with a letterless sign, which stands for words that are tokens of their own.
    yield from (form.format(**blank).replace("\N{BULLET}", "1") for form in forms)
    yield from ("image 56x56", "1=1\n1=1\n\n")
    call = {"function": {"name": "get_weather", "arguments": '{"city": "1"}'}, "id": "1"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "1"},
    ]
    for effort in ("low", "high", "max"):
        options = EncoderOptions(effort=effort)
        yield from (s.text for s in chat_segments(messages, [words.WEATHER_TOOL], options))


def merge_ranks(texts: Iterable[str]) -> list[bytes]:
    """Returns byte strings by rank: all bytes, then merges until each text is one token.

    The commonest pair is merged first (Sennrich et al., arXiv:1508.07909), ties by order of bytes.
    """
    ranks = [bytes([value]) for value in range(256)]
    parts = [[bytes([value]) for value in text.encode()] for text in texts]
    known = set(ranks)
    while pairs := Counter(pair for part in parts for pair in pairwise(part)):
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if left + right not in known:
            known.add(left + right)
            ranks.append(left + right)
        parts = [_merged(part, left + right) for part in parts]
    return ranks


def _merged(part: list[bytes], joined: bytes) -> list[bytes]:
    """Joins every neighbouring pair that makes up `joined`, from the left."""
    out: list[bytes] = []
    for item in part:
        if out and out[-1] + item == joined:
            out[-1] = joined
        else:
            out.append(item)
    return out
