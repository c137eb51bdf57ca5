"""Owns which earlier tokens attention reads, and how a user says so; knows no tensor.

The text is a list of rules with semicolons between them, each `LAYERS: PATTERN`, of which the first
that names a layer holds. LAYERS are numbers and ranges from 0 on (`0,4-7`) or `*`; without them a
rule is for all layers. A PATTERN is one of

    full                                 every earlier token
    window=4096                          the latest so many, its own included
    window=4096,sinks=4                  and the first ones of the sequence
    sparse=64x32                         the 32 blocks of 64 tokens that fit a token best
    sparse=64x32,recent=512,sinks=64     and the latest and the first tokens, in whole blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from firstlight.errors import UsageError
from firstlight.sharding.state_spec import GroupedQueryState, LatentState, StateSpec

# Tokens whose pages attention brings at once from outside the device.
SEGMENT_TOKENS = 2048
# Tokens whose pages are held at once where blocks are chosen: some hundred tokens of a prompt that
# stand side by side choose so many together.
CHOSEN_TOKENS = 8 * SEGMENT_TOKENS
EXAMPLE = '"full", "window=4096,sinks=4", "sparse=64x32" or "0-3: full; *: sparse=64x32"'


@dataclass(frozen=True)
class AttentionPattern:
    """What a token reads. With a `window` it is so many latest tokens; with `blocks` it is that
    many chosen blocks of `block` tokens and all blocks that the latest `recent` tokens touch; in
    both cases also the first `sinks` tokens, for blocks rounded up to whole ones.
    """

    window: int | None = None
    sinks: int = 0
    block: int = 0
    blocks: int = 0
    recent: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every earlier token is read."""
        return self.window is None and not self.block

    @property
    def is_sparse(self) -> bool:
        """Whether blocks are chosen."""
        return self.block > 0

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        first = f"sparse={self.block}x{self.blocks}" if self.block else f"window={self.window}"
        recent = f",recent={self.recent}" if self.block else ""
        return first + recent + (f",sinks={self.sinks}" if self.sinks else "")


FULL = AttentionPattern()


class AttentionRule(NamedTuple):
    """A pattern and the layers it is for; None for all."""

    layers: frozenset[int] | None
    pattern: AttentionPattern


def parse_attention(text: str) -> tuple[AttentionRule, ...]:
    """Returns the rules of a text in order. Raises UsageError for what it does not understand."""
    return tuple(_rule(part.strip(), text) for part in text.split(";"))


def patterns_of(
    rules: Sequence[AttentionRule], states: Sequence[StateSpec]
) -> tuple[AttentionPattern, ...]:
    """Returns the pattern of every layer; layers without a cache that grows have the full one.

    Raises UsageError for a layer that a rule names and the model does not have, or that keeps no
    keys of earlier tokens, or has a window of its own.
    """
    for rule in rules:
        for layer in sorted(rule.layers or ()):
            if layer >= len(states):
                raise UsageError(
                    f"--attention names layer {layer}; the model has layers 0 to {len(states) - 1}"
                )
            _check_layer(layer, states[layer], rule.pattern)
    return tuple(_pattern_of(rules, layer, state) for layer, state in enumerate(states))


def with_pattern(state: StateSpec, pattern: AttentionPattern, page_tokens: int) -> StateSpec:
    """Returns the state that a layer of this pattern keeps in pages of `page_tokens`: a window is
    charged at its size, and choosing blocks needs a summary of every page.
    """
    if pattern.is_full or not isinstance(state, GroupedQueryState | LatentState):
        return state
    if pattern.is_sparse:
        return replace(state, summary_tokens=page_tokens)
    return replace(state, window=pattern.window, sinks=pattern.sinks)


def check_pages(patterns: Sequence[AttentionPattern], page_tokens: int) -> None:
    """Raises UsageError for blocks that are not whole pages."""
    for pattern in patterns:
        if pattern.block % page_tokens:
            raise UsageError(
                f"--attention: blocks of {pattern.block} tokens are not whole pages of "
                f"{page_tokens}; choose a multiple, or another --block-size"
            )


def _pattern_of(rules: Sequence[AttentionRule], layer: int, state: StateSpec) -> AttentionPattern:
    for rule in rules:
        if rule.layers is None or layer in rule.layers:
            keeps_keys = isinstance(state, GroupedQueryState | LatentState)
            has_window = getattr(state, "window", None) is not None
            return rule.pattern if keeps_keys and not has_window else FULL
    return FULL


def _check_layer(layer: int, state: StateSpec, pattern: AttentionPattern) -> None:
    if pattern.is_full:
        return
    if not isinstance(state, GroupedQueryState | LatentState):
        raise UsageError(
            f"--attention: layer {layer} keeps a {state.kind} state, which has no keys to leave "
            "out; name layers with attention, or *"
        )
    if state.window is not None:
        raise UsageError(
            f"--attention: layer {layer} has a window of {state.window} tokens of its own"
        )


def _rule(part: str, text: str) -> AttentionRule:
    layers, colon, words = part.rpartition(":")
    if colon and not layers.strip():
        raise _refusal(text, f"{part!r} names no layer before its colon")
    named = layers.strip()
    chosen = None if named in ("", "*") else _layers(named, text)
    return AttentionRule(chosen, _pattern(words.strip(), text))


def _layers(named: str, text: str) -> frozenset[int]:
    found: set[int] = set()
    for word in named.split(","):
        first, dash, last = (piece.strip() for piece in word.partition("-"))
        ends = (first, last) if dash else (first, first)
        if not all(_is_number(end) for end in ends) or int(ends[0]) > int(ends[1]):
            raise _refusal(text, f"{word.strip()!r} is no layer, range of layers or *")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return frozenset(found)


def _pattern(words: str, text: str) -> AttentionPattern:
    if words == "full":
        return FULL
    values: dict[str, str] = {}
    for word in words.split(","):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or name in values:
            raise _refusal(text, f"{word.strip()!r} is not understood")
        values[name] = value
    kind = next((name for name in ("window", "sparse") if name in values), None)
    allowed = {"window": {"window", "sinks"}, "sparse": {"sparse", "recent", "sinks"}}
    unknown = sorted(set(values) - allowed.get(kind or "", set()))
    if kind is None or unknown:
        raise _refusal(text, f"{words!r} is no pattern" + (f" with {unknown[0]}" if kind else ""))
    return _sparse(values, text) if kind == "sparse" else _window(values, text)


def _window(values: dict[str, str], text: str) -> AttentionPattern:
    window = _number(values, "window", text, least=1)
    return AttentionPattern(window=window, sinks=_number(values, "sinks", text, default=0))


def _sparse(values: dict[str, str], text: str) -> AttentionPattern:
    block, cross, blocks = (piece.strip() for piece in values["sparse"].partition("x"))
    if not cross or not _is_number(block) or not _is_number(blocks) or not int(block):
        raise _refusal(text, f"sparse={values['sparse']} is not TOKENSxBLOCKS, as in sparse=64x32")
    size = int(block)
    return AttentionPattern(
        sinks=_number(values, "sinks", text, default=size),
        block=size,
        blocks=int(blocks),
        recent=_number(values, "recent", text, default=4 * size, least=1),
    )


def _number(
    values: dict[str, str], name: str, text: str, *, default: int | None = None, least: int = 0
) -> int:
    if name not in values and default is not None:
        return default
    if not _is_number(values[name]) or int(values[name]) < least:
        raise _refusal(text, f"{name}={values[name]} is no number of tokens from {least} on")
    return int(values[name])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _refusal(text: str, reason: str) -> UsageError:
    return UsageError(f"--attention {text!r}: {reason}; write for example {EXAMPLE}")
