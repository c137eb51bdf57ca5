"""Owns how much of its past a token reads under a pattern of attention, and how much of that lies
outside the device.

Knows no hardware and no seconds; the patterns are those of `sharding.attention_pattern`.
"""

from __future__ import annotations

from firstlight.cache.cache_group import RECURRENT
from firstlight.sharding.attention_pattern import AttentionPattern
from firstlight.sharding.state_spec import GroupedQueryState, StateSpec


def tokens_read(state: StateSpec, pattern: AttentionPattern, past: float) -> float:
    """Returns how many of `past` earlier tokens one token reads in a layer."""
    window: int | None = getattr(state, "window", None)
    if window is not None:
        return min(past, window + int(getattr(state, "sinks", 0)))
    if pattern.is_sparse:
        return min(past, pattern.sinks + pattern.recent + pattern.blocks * pattern.block)
    return past


def summaries_read(state: StateSpec, past: float) -> float:
    """Returns the summaries a token compares itself with before it chooses blocks."""
    tokens: int = getattr(state, "summary_tokens", 0)
    return past / tokens if tokens else 0.0


def tokens_fetched(
    state: StateSpec, pattern: AttentionPattern, past: int, beyond: int, *, tp: int
) -> float:
    """Returns how many tokens outside the device a layer has to bring for one token, where the
    oldest `beyond` of `past` lie there.

    Pages of a window never do, and recurrent state has none. Of chosen blocks as large a part is
    expected there as of the blocks there are to choose from, J; K heads that choose M blocks each
    want J x (1 - (1 - M/J)^K) different ones.
    """
    if state.kind == RECURRENT or getattr(state, "window", None) is not None:
        return 0.0
    if not pattern.is_sparse:
        return float(beyond)
    candidates = past - pattern.sinks - pattern.recent
    if candidates <= 0:
        return float(beyond)
    heads = state.local_heads(tp) if isinstance(state, GroupedQueryState) else 1
    number = candidates / pattern.block
    chosen = number * (1 - (1 - min(1.0, pattern.blocks / number)) ** heads)
    there = min(1.0, max(0, beyond - pattern.sinks) / candidates)
    return min(float(beyond), pattern.sinks + chosen * pattern.block * there)
