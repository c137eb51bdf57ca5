"""What INT8 caches cost in quality and in time, against float ones, in one run over one text.

Owns the text, the sides and the report. SmolLM2-135M-Instruct reads the reference texts that ship
with Python in pieces, each piece chunk by chunk through both caches; every token is scored by both,
and the token each would choose is compared. The other side keeps what it computes in: float32.

    python benchmarks/kv_int8.py [--tokens 100000] [--piece 2048] [--threads 2]
    python benchmarks/kv_int8.py --first 0 --tokens 50000 --sums a.json   # a run in parts
    python benchmarks/kv_int8.py --first 51200 --tokens 50000 --sums a.json
    python benchmarks/kv_int8.py --tokens 8192 --piece 8192               # decode behind 8,191
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from paired import medians

# isort: split
import torch
from torch import Tensor

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.inputs.tokenizer import load_tokenizer
from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.layers.carry import select_tokens
from firstlight.layers.layer_state import LayerState
from firstlight.layers.packed_batch import PackedBatch
from firstlight.parallel.mesh import Mesh
from firstlight.runner.cache_tensors import CacheShape, allocate_states, state_bytes
from firstlight.sharding.layout import Layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from fetch_smollm2 import fetch

CPU, PAGE = torch.device("cpu"), 16
# Positions whose logits are held at once.
SCORED = 128
# Positions behind which a context counts as long.
LONG = 1024


@dataclass
class Loss:
    """Sums over scored tokens."""

    tokens: int = 0
    nats: dict[str, float] = field(default_factory=lambda: {"float32": 0.0, "int8": 0.0})
    agreed: int = 0
    divergence: float = 0.0

    def add(self, scores: dict[str, Tensor], target: Tensor) -> None:
        """Takes log-probabilities [T, V] of both sides, and the tokens that came."""
        exact, rough = scores["float32"], scores["int8"]
        for side, found in scores.items():
            self.nats[side] -= float(found.gather(1, target[:, None]).double().sum())
        self.tokens += len(target)
        self.agreed += int((exact.argmax(1) == rough.argmax(1)).sum())
        self.divergence += float((exact.exp() * (exact - rough)).double().sum())

    def plus(self, other: dict[str, Any]) -> None:
        """Takes the sums of another run."""
        self.tokens += other["tokens"]
        self.agreed += other["agreed"]
        self.divergence += other["divergence"]
        for side, nats in other["nats"].items():
            self.nats[side] += nats

    def __str__(self) -> str:
        before, after = (math.exp(self.nats[side] / self.tokens) for side in ("float32", "int8"))
        return (
            f"{self.tokens} tokens: perplexity {before:.4f} -> {after:.4f} "
            f"({after / before - 1:+.3%}), same choice {self.agreed / self.tokens:.3%}, "
            f"divergence {self.divergence / self.tokens:.2e} nats"
        )


class Reader:
    """SmolLM2 over caches of one kind, for one sequence of at most `length` tokens."""

    def __init__(self, module: Any, states: Sequence[LayerState], length: int) -> None:
        self.module, self.states = module, states
        self.table_BP = torch.arange(1, -(-length // PAGE) + 1).int()[None]

    def read(self, tokens: Sequence[int], first: int) -> Any:
        """Computes tokens behind `first` earlier ones; returns their carry."""
        count = len(tokens)
        batch = PackedBatch(
            positions_T=torch.arange(first, first + count),
            bounds=(0, count),
            starts_B1=torch.tensor([0, count]).int(),
            contexts_B=torch.tensor([first + count]).int(),
            tables=(self.table_BP,),
        )
        return self.module(torch.tensor(tokens), batch, self.states)


def make_readers(length: int, threads: int) -> tuple[dict[str, Reader], list[int]]:
    """Returns both sides over one model, and the text as token ids."""
    folder = fetch()
    source = open_source(folder)
    kernels = builtin_kernels().resolve(machine_query())
    options = BuildOptions(torch.float32, CPU, length, threads=threads)
    mesh = Mesh(Layout().place(0))
    model = assemble(source.spec, source.weights, mesh=mesh, kernels=kernels, options=options)
    readers, pages = {}, -(-length // PAGE) + 1
    for side, kv_dtype in (("float32", "auto"), ("int8", "int8")):
        shape = CacheShape(pages, PAGE, 1, torch.float32, CPU, kv_dtype=kv_dtype)
        states = allocate_states(source.spec.states, shape)
        print(f"{side}: {state_bytes(states) / pages / PAGE:.0f} bytes of cache a token")
        readers[side] = Reader(model.module, states, length)
    text = "\n\n".join(str(topics[name]) for name in sorted(topics))
    return readers, load_tokenizer(folder).encode_plain(text)


def score(readers: dict[str, Reader], piece: list[int], chunk: int, losses: Sequence[Loss]) -> None:
    """Scores a piece on both sides; the second loss takes what lies behind LONG tokens only."""
    for first in range(0, len(piece) - 1, chunk):
        part = piece[first : first + chunk]
        carries = {side: reader.read(part, first) for side, reader in readers.items()}
        for begin, end in _ranges(min(len(part), len(piece) - 1 - first)):
            index = torch.arange(begin, end)
            scores = {
                side: readers[side].module.head(select_tokens(carry, index)).log_softmax(-1)
                for side, carry in carries.items()
            }
            target = torch.tensor(piece[first + begin + 1 : first + end + 1])
            losses[0].add(scores, target)
            if first + begin >= LONG:
                losses[1].add(scores, target)


def add_sums(path: Path, losses: Sequence[Loss]) -> None:
    """Adds the sums of earlier parts to these, and keeps all for the next part."""
    if path.exists():
        for loss, earlier in zip(losses, json.loads(path.read_text()), strict=True):
            loss.plus(earlier)
    path.write_text(json.dumps([vars(loss) for loss in losses]))


def _ranges(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, SCORED):
        yield begin, min(count, begin + SCORED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="token of the text to begin with")
    parser.add_argument("--sums", type=Path, help="file whose sums are added to, and kept")
    parser.add_argument("--piece", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        readers, text = make_readers(given.piece, given.threads)
        losses = (Loss(), Loss())
        end = min(given.first + given.tokens, len(text))
        for start in range(given.first, end - given.piece + 1, given.piece):
            score(readers, text[start : start + given.piece], given.chunk, losses)
        if given.sums is not None:
            add_sums(given.sums, losses)
        print(f"all: {losses[0]}")
        if losses[1].tokens:
            print(f"behind {LONG} tokens of context: {losses[1]}")
        last = given.piece - 1
        times = medians(
            {side: lambda r=reader: r.read([5], last) for side, reader in readers.items()},
            given.rounds,
        )
        shown = ", ".join(f"{side} {1e3 * value:.1f} ms" for side, value in times.items())
        print(f"one token behind {last}: {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
