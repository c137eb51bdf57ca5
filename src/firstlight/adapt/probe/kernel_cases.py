"""Owns small known inputs for every operation of the kernel registry; knows no device.

Inputs are made on the CPU in the dtype asked for; state tensors are part of them and are compared
after the call like results. Two sizes each: one token, and several sequences of unequal length.

Shape letters: T tokens, D model width, N heads, K key/value heads, H head channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from firstlight.kernels.activation import Activation
from firstlight.kernels.mxfp4 import Mxfp4
from firstlight.kernels.packed_weight import PackedAttention, PackedMlp, PackedWeight, pack_weight
from firstlight.kernels.reference.packed import pack_weight_as
from firstlight.sharding.state_spec import INT8_GROUP

WIDTH, INNER, HEADS, KV_HEADS, CHANNELS = 128, 192, 4, 2, 64
PAGES, SLOTS, EXPERTS = 12, 16, 4
# Lengths of the sequences of a batch; each has that many earlier tokens and four.
BATCHES = ((1,), (3, 17, 1))
SITU = Activation(4.0, 25.0)
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Batch:
    """Lengths of the new parts of sequences, and the generator all values come from."""

    lengths: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return sum(self.lengths)

    def normal(self, *shape: int) -> Tensor:
        """Normal values in the batch's dtype."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def weight(self, rows: int, columns: int) -> Tensor:
        """A matrix that keeps the size of what it is multiplied with."""
        values = torch.randn(rows, columns, generator=self.generator)
        return (values / sqrt(columns)).to(self.dtype)

    def int8(self, *shape: int) -> Tensor:
        """INT8 values within 127."""
        return (torch.randint(-127, 128, shape, generator=self.generator)).to(torch.int8)

    def scales(self, *shape: int) -> Tensor:
        """The fp16 scales that make INT8 values of about one."""
        return ((torch.rand(shape, generator=self.generator) + 0.5) / 127).half()

    def ids(self, bound: int, *shape: int) -> Tensor:
        """Integers below a bound."""
        return torch.randint(0, bound, shape, generator=self.generator)

    def starts(self) -> Tensor:
        """Where each sequence begins among the tokens, and their end; int32."""
        return torch.tensor([0, *torch.tensor(self.lengths).cumsum(0)], dtype=torch.int32)

    def paged(self) -> Inputs:
        """Starts, contexts and a page table that goes backwards, so that order matters."""
        contexts = torch.tensor([2 * length + 4 for length in self.lengths], dtype=torch.int32)
        pages = -(-int(contexts.max()) // SLOTS)
        table = torch.arange(PAGES - 1, -1, -1, dtype=torch.int32)[: len(contexts) * pages]
        return self.starts(), contexts, table.view(len(contexts), pages)

    def slots(self) -> Inputs:
        """Slots of recurrent state, the first sequence fresh."""
        count = len(self.lengths)
        slots = torch.arange(count, 0, -1, dtype=torch.int32)
        return slots, torch.tensor([True] + [False] * (count - 1))

    def angles(self) -> Inputs:
        """Positions and rotary tables of a quarter of the channels each."""
        turns = torch.arange(64.0)[:, None] * 0.5 ** torch.arange(CHANNELS // 4)
        return self.ids(64, self.tokens), turns.cos(), turns.sin()


def _heads(b: Batch) -> tuple[Tensor, Tensor, Tensor]:
    size = (b.tokens, KV_HEADS, CHANNELS)
    return b.normal(b.tokens, HEADS, CHANNELS), b.normal(*size), b.normal(*size)


def _pages(b: Batch) -> Inputs:
    return (
        *(b.normal(PAGES, KV_HEADS, SLOTS, CHANNELS) for _ in range(2)),
        *b.paged(),
        CHANNELS**-0.5,
    )


def _routed(b: Batch) -> tuple[Tensor, Tensor]:
    ids = torch.stack(
        [torch.randperm(EXPERTS + 2, generator=b.generator)[:2] for _ in range(b.tokens)]
    )
    return ids, torch.rand(b.tokens, 2, generator=b.generator).to(b.dtype)


def _mxfp4(b: Batch, rows: int, columns: int) -> Mxfp4:
    codes = b.ids(256, EXPERTS, rows, columns // 2).to(torch.uint8)
    return Mxfp4(codes, (b.ids(4, EXPERTS, rows, columns // 32) + 121).to(torch.uint8))


def _packed(b: Batch, rows: int, columns: int, form: str) -> PackedWeight:
    weight = torch.randn(rows, columns, generator=b.generator) * columns**-0.5
    weight = weight.bfloat16().float() if form == "bfloat16" else weight
    return pack_weight(weight, pack_weight_as)


def _rows_of_four_bits(b: Batch) -> Tensor:
    q = b.ids(16, WIDTH, WIDTH // 32, 32).float()
    q[..., 0], q[..., 31] = 0.0, 15.0
    return (q * 0.25 - 1.5).view(WIDTH, WIDTH)


def _packed_attention(b: Batch) -> PackedAttention:
    own, shared = HEADS * CHANNELS, KV_HEADS * CHANNELS
    q, k, v = (_packed(b, n, WIDTH, "bfloat16") for n in (own, shared, shared))
    o = _packed(b, WIDTH, own, "float32")
    scale, (_, cos, sin) = CHANNELS**-0.5, b.angles()
    no_biases, no_norms, no_window = (None,) * 4, (None,) * 2, None
    return PackedAttention(
        *(q, k, v, o), *no_biases, *no_norms, 1e-6, CHANNELS, scale, no_window, cos, sin
    )


def _packed_mlp(b: Batch) -> PackedMlp:
    gate, up = (_packed(b, INNER, WIDTH, "bfloat16") for _ in "gu")
    return PackedMlp(gate, up, _packed(b, WIDTH, INNER, "float32"))


def _delta(b: Batch) -> Inputs:
    q, k = (
        torch.nn.functional.normalize(b.normal(b.tokens, HEADS, CHANNELS), dim=-1) for _ in "qk"
    )
    state = b.normal(len(b.lengths) + 1, HEADS, CHANNELS, CHANNELS).float()
    decay = -b.normal(b.tokens, HEADS, CHANNELS).abs()
    beta = torch.rand(b.tokens, HEADS, generator=b.generator).to(b.dtype)
    return q, k, b.normal(b.tokens, HEADS, CHANNELS), decay, beta, b.starts(), state, *b.slots()


def _latent(b: Batch) -> tuple[Tensor, Tensor]:
    width = WIDTH + 16
    return b.normal(b.tokens, width), b.normal(PAGES, SLOTS, width)


def _segment(b: Batch, *values: Any) -> Inputs:
    """What segments take from starts on: all positions, on top of what queries carry."""
    starts, contexts, table = b.paged()
    carry = b.normal(b.tokens, HEADS, values[-1] + 2).abs().float()
    return starts, contexts, contexts * 0, contexts, table, *values[:-1], carry


def _int8_expanded(b: Batch) -> Inputs:
    new, *cached = _int8_latent(b)
    queries, expansion = b.normal(b.tokens, HEADS, 48), b.normal(HEADS, 64, WIDTH) * 0.1
    return queries, new, expansion, *cached, *b.paged(), 0.1


def _int8_pages(b: Batch) -> Inputs:
    """INT8 keys and values, each with a scale for a token and head."""
    size = (PAGES, KV_HEADS, SLOTS)
    pages = [(b.int8(*size, CHANNELS), b.scales(*size)) for _ in "kv"]
    return (*pages[0], *pages[1], *b.paged(), CHANNELS**-0.5)


def _int8_latent(b: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """New rows, INT8 rows of the cache, and their scales."""
    width = WIDTH + 16
    groups = -(-width // INT8_GROUP)
    pages = b.int8(PAGES, SLOTS, width), b.scales(PAGES, SLOTS, groups)
    return b.normal(b.tokens, width), *pages


MAKERS: dict[str, Callable[[Batch], Inputs]] = {
    "rms_norm": lambda b: (b.normal(b.tokens, WIDTH), b.normal(WIDTH), 1e-6),
    "add_rms_norm": lambda b: (*(b.normal(b.tokens, WIDTH) for _ in "xr"), b.normal(WIDTH), 1e-6),
    "linear": lambda b: (b.normal(b.tokens, WIDTH), b.weight(INNER, WIDTH), b.normal(INNER)),
    "linear_add": lambda b: (
        b.normal(b.tokens, WIDTH), b.weight(INNER, WIDTH), None, b.normal(b.tokens, INNER),
    ),
    "linear_group": lambda b: (
        b.normal(b.tokens, WIDTH), [b.weight(n, WIDTH) for n in (INNER, 64)], [None, b.normal(64)],
    ),
    "gated_mlp_in": lambda b: (b.normal(b.tokens, WIDTH), *(b.weight(INNER, WIDTH) for _ in "gu")),
    "rotary": lambda b: (*_heads(b)[:2], *b.angles()),
    "paged_attention": lambda b: (*_heads(b), *_pages(b)),
    "rotary_paged_attention": lambda b: (*_heads(b), *b.angles(), *_pages(b)),
    "attention": lambda b: (*_heads(b), b.starts(), CHANNELS**-0.5),
    "greedy": lambda b: (b.normal(len(b.lengths), 301) * 4,),
    "gated_activation": lambda b: (*(b.normal(b.tokens, INNER) for _ in "gu"), SITU),
    "experts": lambda b: (
        b.normal(b.tokens, WIDTH), *_routed(b),
        *(b.normal(EXPERTS, INNER, WIDTH) * 0.1 for _ in "13"),
        b.normal(EXPERTS, WIDTH, INNER) * 0.1, 1, SITU,
    ),
    "experts_mxfp4": lambda b: (
        b.normal(b.tokens, WIDTH), *_routed(b), *(_mxfp4(b, INNER, WIDTH) for _ in "13"),
        _mxfp4(b, WIDTH, INNER), 1, SITU,
    ),
    "short_conv": lambda b: (
        b.normal(b.tokens, WIDTH), b.normal(WIDTH, 1, 4).float(), b.starts(),
        b.normal(len(b.lengths) + 1, 3, WIDTH), *b.slots(),
    ),
    "delta_rule": _delta,
    "latent_attention": lambda b: (
        b.normal(b.tokens, HEADS, WIDTH + 16), *_latent(b), *b.paged(), 0.1, WIDTH,
    ),
    "expanded_latent_attention": lambda b: (
        b.normal(b.tokens, HEADS, 48), _latent(b)[0], b.normal(HEADS, 64, WIDTH) * 0.1,
        _latent(b)[1], *b.paged(), 0.1,
    ),
    "segment_attention": lambda b: (
        *_heads(b), *_pages(b)[:2], *_segment(b, CHANNELS**-0.5, CHANNELS),
    ),
    "segment_latent_attention": lambda b: (
        b.normal(b.tokens, HEADS, WIDTH + 16), *_latent(b), *_segment(b, 0.1, WIDTH),
    ),
    "int8_segment_attention": lambda b: (
        *_heads(b), *_int8_pages(b)[:4], *_segment(b, CHANNELS**-0.5, CHANNELS),
    ),
    "int8_segment_latent_attention": lambda b: (
        b.normal(b.tokens, HEADS, WIDTH + 16), *_int8_latent(b), *_segment(b, 0.1, WIDTH),
    ),
    "int8_paged_attention": lambda b: (*_heads(b), *_int8_pages(b)),
    "int8_latent_attention": lambda b: (
        b.normal(b.tokens, HEADS, WIDTH + 16), *_int8_latent(b), *b.paged(), 0.1, WIDTH,
    ),
    "int8_expanded_latent_attention": _int8_expanded,
    "residual_mix": lambda b: (
        b.normal(b.tokens, 3, WIDTH), b.normal(b.tokens, WIDTH), b.normal(WIDTH), 1e-6,
    ),
    "pack_weight_as": lambda b: (_rows_of_four_bits(b), "affine4"),
    "packed_rows": lambda b: (_packed(b, INNER, WIDTH, "bfloat16"), b.ids(INNER, b.tokens)),
    "packed_linear": lambda b: (b.normal(b.tokens, WIDTH), _packed(b, INNER, WIDTH, "bfloat16")),
    "packed_mlp": lambda b: (b.normal(b.tokens, WIDTH), _packed_mlp(b)),
    "packed_attention": lambda b: (
        b.normal(b.tokens, WIDTH), _packed_attention(b), b.angles()[0], *_pages(b)[:-1],
    ),
}  # fmt: skip


def inputs_of(operation: str, dtype: torch.dtype) -> Iterator[Inputs]:
    """Yields the inputs of every size; the same each time."""
    for lengths in BATCHES:
        yield MAKERS[operation](Batch(lengths, dtype, torch.Generator().manual_seed(7)))


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns the value with every tensor in it changed; tuples of names keep their type."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(change, part) for part in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Returns every tensor in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []
