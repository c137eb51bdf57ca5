"""Owns how a layer declares the state it keeps and what that costs in bytes; knows no tensor.

Each layer of a model declares one StateSpec (or none). The cache manager holds one group per
distinct spec, the planner prices it, the runner allocates it.
"""

from dataclasses import dataclass
from typing import Protocol

# Values of a latent row that share one scale when it is kept in INT8 or FP8.
INT8_GROUP = 64
# Types of caches that keep a byte a value and scales beside them.
BYTE_CACHES = ("int8", "fp8")
SCALE_BYTES = 2
SUMMARY_BYTES = 4  # a channel: its highest and its lowest value in fp16


class StateSpec(Protocol):
    """What a layer keeps. Bytes are those of one rank of a TP group."""

    @property
    def kind(self) -> str:
        """`grouped_query`, `latent`, `recurrent` or `encoder`."""
        ...

    def token_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per cached token and layer; 0 when the state does not grow."""
        ...

    def sequence_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per sequence and layer, independent of its length."""
        ...


@dataclass(frozen=True)
class GroupedQueryState:
    """Keys and values per token, `kv_heads` x `head_dim` each. `window` bounds what is attended
    beside the first `sinks` tokens; with `summary_tokens` so many share one summary of their keys.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    kind: str = "grouped_query"
    sinks: int = 0
    summary_tokens: int = 0

    def local_heads(self, tp: int) -> int:
        """KV heads on one rank: at least one, replicated when there are fewer than ranks."""
        return max(1, self.kv_heads // tp)

    def token_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per cached token and layer on one rank."""
        return 2 * self.local_heads(tp) * self.head_dim * element_bytes

    def sequence_bytes(self, tp: int, element_bytes: int) -> int:
        """Nothing is kept per sequence."""
        return 0


@dataclass(frozen=True)
class LatentState:
    """One latent row of `width` values per token, shared by all heads: it does not divide by TP.

    The rest is as for GroupedQueryState.
    """

    width: int
    kind: str = "latent"
    window: int | None = None
    sinks: int = 0
    summary_tokens: int = 0

    def token_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per cached token and layer, the same on every rank."""
        return self.width * element_bytes

    def sequence_bytes(self, tp: int, element_bytes: int) -> int:
        """Nothing is kept per sequence."""
        return 0


@dataclass(frozen=True)
class RecurrentState:
    """One fp32 matrix per head and the last inputs of short convolutions; fixed per sequence."""

    heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_taps: int
    kind: str = "recurrent"

    def token_bytes(self, tp: int, element_bytes: int) -> int:
        """The state does not grow with tokens."""
        return 0

    def sequence_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per sequence and layer on one rank: fp32 state plus convolution inputs."""
        matrices = self.heads // tp * self.key_dim * self.value_dim * 4
        return matrices + self.conv_channels // tp * self.conv_taps * element_bytes


@dataclass(frozen=True)
class EncoderState:
    """Encoder outputs of one image: `width` values for each of its feature rows."""

    width: int
    kind: str = "encoder"

    def token_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per feature row."""
        return self.width * element_bytes

    def sequence_bytes(self, tp: int, element_bytes: int) -> int:
        """Nothing is kept per sequence."""
        return 0


def cached_token_bytes(state: StateSpec, tp: int, element_bytes: int, kv_dtype: str) -> int:
    """Bytes per cached token and layer on one rank, of caches of `kv_dtype`: `auto` keeps the
    compute type; BYTE_CACHES a byte a value and an fp16 scale per head, or per INT8_GROUP of a
    latent. A token's share of its summary is rounded up; `cached_page_bytes` is exact.
    """
    return _row_bytes(state, tp, element_bytes, kv_dtype) + summary_bytes(state, tp)


def cached_page_bytes(
    state: StateSpec, tp: int, element_bytes: int, kv_dtype: str, page_tokens: int
) -> int:
    """Bytes of one layer's page on one rank, its summary included."""
    rows = _row_bytes(state, tp, element_bytes, kv_dtype) * page_tokens
    return rows + page_summary_bytes(state, tp)


def summary_bytes(state: StateSpec, tp: int) -> int:
    """Bytes of summaries a cached token, rounded up."""
    tokens: int = getattr(state, "summary_tokens", 0)
    return -(-page_summary_bytes(state, tp) // tokens) if tokens else 0


def page_summary_bytes(state: StateSpec, tp: int) -> int:
    """Bytes of one page's summary on one rank; 0 where no layer chooses by them."""
    if isinstance(state, LatentState) and state.summary_tokens:
        return state.width * SUMMARY_BYTES
    if isinstance(state, GroupedQueryState) and state.summary_tokens:
        return state.local_heads(tp) * state.head_dim * SUMMARY_BYTES
    return 0


def _row_bytes(state: StateSpec, tp: int, element_bytes: int, kv_dtype: str) -> int:
    if kv_dtype in BYTE_CACHES and isinstance(state, GroupedQueryState):
        return 2 * state.local_heads(tp) * (state.head_dim + SCALE_BYTES)
    if kv_dtype in BYTE_CACHES and isinstance(state, LatentState):
        return state.width + int8_groups(state.width) * SCALE_BYTES
    return state.token_bytes(tp, element_bytes)


def int8_groups(width: int) -> int:
    """Scales of a latent row of that many values."""
    return -(-width // INT8_GROUP)
