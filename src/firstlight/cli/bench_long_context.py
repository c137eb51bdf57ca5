"""Owns the verb `bench long-context`: flags in, report out; what is asked of which model.

The comparison is accept's, and reading the runner's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.errors import UsageError
from firstlight.settings.settings import required, resolve_flags, setting

if TYPE_CHECKING:
    from firstlight.accept.long_context import Material, Question
    from firstlight.inputs.tokenizer import Tokenizer

MARGIN = 64  # tokens of a question beside its list
LOOKUP = "lines key=value in a conversation, and a question about one of them"
NEEDLE = "a number hidden in Python's reference texts, and the perplexity of these"
HIDDEN = "\n\nThe pass number of this text is {number}.\n\n"
ASKED = "\n\nThe pass number of this text is"


@dataclass(frozen=True, kw_only=True)
class LongContextFlags:
    """What the verb takes; lengths in tokens."""

    model: Path = required("store, checkpoint folder or GGUF file")
    lengths: str = setting("4096,16384", "context lengths, with commas between them")
    questions: int = setting(4, "questions at each length", minimum=1)
    ways: str | None = setting(
        None,
        "ways to attend with | between them, like: full | int8 full | window=4096,sinks=4",
        optional_text="full, window, sparse and INT8 sized by the longest context",
    )
    page_tokens: int = setting(16, "tokens in a cache block", minimum=1)
    threads: int = setting(1, "CPU threads of the arithmetic", minimum=1)


@options_from(LongContextFlags, arguments=("model",))
def long_context(flags: Mapping[str, Any], as_json: AsJson = False) -> int:
    """Compare patterns of attention with full attention."""
    from firstlight.accept.long_context import (
        compare,
        default_ways,
        long_context_report,
        parse_ways,
    )
    from firstlight.runner.model_path import read_spec
    from firstlight.runner.solo_reader import SoloModel, SoloShape

    given = resolve_flags(LongContextFlags, flags)
    lengths = _lengths(given.lengths)
    ways = default_ways(lengths[-1]) if given.ways is None else parse_ways(given.ways)
    spec = read_spec(given.model)
    has_lists = spec.family.name == "kimi_k3"
    if not has_lists and lengths[-1] > spec.context_length:
        raise UsageError(f"{given.model} reads at most {spec.context_length} tokens")
    ask = _lists if has_lists else _needles
    material = {length: ask(given.model, length, given.questions) for length in lengths}
    longest = max(len(q.prompt) + len(q.answer) for m in material.values() for q in m.questions)
    shape = SoloShape(max(longest, lengths[-1]) + MARGIN, given.page_tokens, threads=given.threads)
    model = SoloModel(given.model, shape)
    rows = list(compare(ways, material, lambda way: model.reader(way.attention, way.kv_dtype)))
    source = LOOKUP if has_lists else NEEDLE
    return show(long_context_report(str(given.model), rows, source), as_json=as_json)


def _lengths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) >= 256 for word in words):
        raise UsageError(f"--lengths {text}: write numbers of at least 256 tokens, like 4096,16384")
    return sorted({int(word) for word in words})


def _lists(path: Path, length: int, count: int) -> Material:
    """Lists of pairs and lines of numbers, as k3-mini has learned to read them."""
    from firstlight.accept.long_context import Material, Question
    from firstlight.runner.model_path import inputs_path
    from firstlight.training.recipes.k3_mini import lookup
    from firstlight.training.recipes.k3_mini.conversations import Renderer

    renderer = Renderer(inputs_path(path))
    room = length - MARGIN
    pairs = min(256, room // 2 // lookup.TOKENS_OF_PAIR)
    filler = max(0, room - pairs * lookup.TOKENS_OF_PAIR) // lookup.TOKENS_OF_FILLER
    size = lookup.ListSize(pairs, filler)
    found: list[Question] = []
    for index in range(count):
        draw = random.Random(f"long context {length} {index}")
        example = renderer.example(lookup.asked_list(draw, size, thinking=False))
        first = example.counts.index(True)
        found.append(Question(example.tokens[:first], example.tokens[first:]))
    return Material(tuple(found), ())


def _needles(path: Path, length: int, count: int) -> Material:
    """A number in a text, at depths from its beginning to its end, and texts to be scored."""
    from pydoc_data.topics import topics

    from firstlight.accept.long_context import Material
    from firstlight.inputs.tokenizer import load_tokenizer
    from firstlight.runner.model_path import inputs_path

    tokenizer = load_tokenizer(inputs_path(path))
    text = tokenizer.encode_plain("\n\n".join(str(topics[name]) for name in sorted(topics)))
    pieces = [text[i * length : (i + 1) * length] for i in range(min(1, len(text) // length))]
    if not pieces:
        raise UsageError(f"the texts at hand have {len(text)} tokens, fewer than {length}")
    found = tuple(_hidden_numbers(tokenizer, text, length, count))
    return Material(found, tuple(tuple(piece) for piece in pieces))


def _hidden_numbers(
    tokenizer: Tokenizer, text: Sequence[int], length: int, count: int
) -> Iterator[Question]:
    from firstlight.accept.long_context import Question

    asked = tokenizer.encode_plain(ASKED)
    for index in range(count):
        draw = random.Random(f"needle {length} {index}")
        number = str(draw.randint(10_000, 99_999))
        hidden = tokenizer.encode_plain(HIDDEN.format(number=number))
        begin = draw.randrange(max(1, len(text) - length))
        around = text[begin : begin + length - len(hidden) - len(asked)]
        depth = len(around) * (2 * index + 1) // (2 * count)
        prompt = (*around[:depth], *hidden, *around[depth:], *asked)
        yield Question(prompt, tuple(tokenizer.encode_plain(f" {number}")))
