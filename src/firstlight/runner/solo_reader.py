"""Owns one sequence in one process: a model over caches of its own, read chunk by chunk.

Knows no scheduler, no other request and no text; measurements of attention and caches use it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import WeightSource, open_source
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.layers.carry import select_tokens
from firstlight.layers.packed_batch import PackedBatch
from firstlight.layers.patterned_attention import set_patterns
from firstlight.models.spec import ModelSpec, with_attention
from firstlight.parallel.mesh import Mesh
from firstlight.runner.cache_tensors import CacheShape, allocate_states
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import StateSpec, cached_token_bytes

CPU = torch.device("cpu")
# Positions whose logits are held at once.
SCORED = 128


class SoloShape(NamedTuple):
    """Tokens of the longest sequence, of a page and of a chunk; CPU threads."""

    length: int
    page_tokens: int = 16
    chunk_tokens: int = 512
    threads: int = 1


class Answer(NamedTuple):
    """Whether greedy decoding gives a right answer, minus the log-probability of the latter, and
    the seconds for the prompt and for each token of the answer.
    """

    is_right: bool
    nats: float
    seconds: float
    token_seconds: float


class SoloModel:
    """A model in float32 on the CPU, loaded once for all ways to read with it."""

    def __init__(self, path: Path, shape: SoloShape) -> None:
        torch.set_num_threads(shape.threads)
        self.shape = shape
        self.source: WeightSource = open_source(path)
        self.kernels = builtin_kernels().resolve(machine_query())
        self.module: Any = assemble(
            self.source.spec,
            self.source.weights,
            mesh=Mesh(Layout().place(0)),
            kernels=self.kernels,
            options=BuildOptions(torch.float32, CPU, shape.length, threads=shape.threads),
        ).module

    def reader(self, attention: str, kv_dtype: str) -> "SoloReader":
        """Returns one that reads as `serve` does with these `--attention` and `--kv-dtype`; one at
        a time. Raises UsageError for a pattern that does not fit.
        """
        return SoloReader(self, attention, kv_dtype)


class SoloReader:
    """Reads one sequence; every method begins a new one."""

    def __init__(self, model: SoloModel, attention: str, kv_dtype: str) -> None:
        shape = model.shape
        self.spec: ModelSpec = with_attention(model.source.spec, attention, shape.page_tokens)
        self._model, self._kv_dtype = model, kv_dtype
        set_patterns(model.module, self.spec.patterns)
        pages = blocks_for(shape.length, shape.page_tokens)
        # Windows are read here, not charged: this cache keeps every page.
        kept = tuple(_without_window(state) for state in self.spec.states)
        cut = CacheShape(
            pages + 1, shape.page_tokens, 1, torch.float32, CPU, num_slots=2, kv_dtype=kv_dtype
        )
        self._states = allocate_states(kept, cut)
        paged_1P = torch.arange(1, pages + 1).int()[None]
        slot_11 = torch.ones(1, 1).int()
        self._tables = tuple(
            slot_11 if state.kind == "recurrent" else paged_1P for state in distinct_specs(kept)
        )

    def cache_bytes(self, tokens: int) -> int:
        """What a service would hold for a sequence of so many tokens."""
        return sum(
            cached_token_bytes(state, 1, 4, self._kv_dtype) * _held(state, tokens)
            + state.sequence_bytes(1, 4)
            for state in self.spec.states
        )

    @torch.inference_mode()
    def nats(self, tokens: Sequence[int]) -> float:
        """Returns minus the log-probability of the tokens behind the first, summed."""
        total = 0.0
        for begin in range(0, len(tokens), self._model.shape.chunk_tokens):
            part = tokens[begin : begin + self._model.shape.chunk_tokens]
            carry = self._read(part, begin)
            last = min(len(part), len(tokens) - 1 - begin)
            for start in range(0, last, SCORED):
                index = torch.arange(start, min(last, start + SCORED))
                logits = self._model.module.head(select_tokens(carry, index)).float()
                came = torch.tensor(tokens[begin + start + 1 : begin + int(index[-1]) + 2])
                found = logits.log_softmax(-1).gather(1, came[:, None])
                total -= float(found.double().sum())
        return total

    @torch.inference_mode()
    def ask(self, prompt: Sequence[int], answer: Sequence[int]) -> Answer:
        """Reads a prompt and then its right answer, token by token."""
        chunk, began = self._model.shape.chunk_tokens, time.perf_counter()
        for begin in range(0, len(prompt), chunk):
            carry = self._read(prompt[begin : begin + chunk], begin)
        read, is_right, nats = time.perf_counter(), True, 0.0
        for index, token in enumerate(answer):
            last = torch.tensor([len(carry[0]) - 1])
            scores_V = self._model.module.head(select_tokens(carry, last))[0].float()
            is_right &= int(scores_V.argmax()) == token
            nats -= float(scores_V.log_softmax(-1)[token])
            carry = self._read([token], len(prompt) + index)
        seconds = (time.perf_counter() - read) / len(answer)
        return Answer(is_right, nats, read - began, seconds)

    def _read(self, tokens: Sequence[int], first: int) -> Any:
        count = len(tokens)
        batch = PackedBatch(
            positions_T=torch.arange(first, first + count),
            bounds=(0, count),
            starts_B1=torch.tensor([0, count]).int(),
            contexts_B=torch.tensor([first + count]).int(),
            tables=self._tables,
        )
        return self._model.module(torch.tensor(tokens), batch, self._states)


def _without_window(state: StateSpec) -> StateSpec:
    if getattr(state, "window", None) is None:
        return state
    return replace(state, window=None, sinks=0)  # type: ignore[type-var]


def _held(state: StateSpec, tokens: int) -> int:
    window: int | None = getattr(state, "window", None)
    return tokens if window is None else min(tokens, window + int(getattr(state, "sinks", 0)))
