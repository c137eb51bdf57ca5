"""What caches of a byte a value cost in quality and in time, against float ones, in one run.

Owns the text, the sides and the report. SmolLM2-135M-Instruct reads the reference texts that ship
with Python in pieces, each piece chunk by chunk through the caches of every side, so that all but
the first chunk read earlier tokens from them; every token is scored by all sides, and the token
each would choose is compared with that of the first side, which keeps what it computes in: float32.

    python benchmarks/kv_int8.py [--tokens 100352] [--piece 8192] [--sides float32,int8,fp8]
    python benchmarks/kv_int8.py --sums sums.json     # goes on where an earlier run was stopped
    python benchmarks/kv_int8.py --tokens 0           # only the time of a token behind 8,191
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from firstlight.errors import UsageError
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
# What `--kv-dtype` is told for a side.
KV_DTYPES = {"float32": "auto", "int8": "int8", "fp8": "fp8"}


@dataclass
class Loss:
    """Sums over scored tokens by side; `agreed` and `divergence` are against the first side."""

    tokens: int = 0
    nats: dict[str, float] = field(default_factory=dict)
    agreed: dict[str, int] = field(default_factory=dict)
    divergence: dict[str, float] = field(default_factory=dict)

    def add(self, scores: Mapping[str, Tensor], target: Tensor) -> None:
        """Takes log-probabilities [T, V] of all sides, and the tokens that came."""
        exact = next(iter(scores.values()))
        chosen, likely = exact.argmax(1), exact.exp()
        self.tokens += len(target)
        for side, found in scores.items():
            _plus(self.nats, side, -float(found.gather(1, target[:, None]).double().sum()))
            if found is not exact:
                _plus(self.agreed, side, int((chosen == found.argmax(1)).sum()))
                far = (likely * (exact - found)).sum(1)
                _plus(self.divergence, side, float(far.double().sum()))

    def plus(self, other: Loss) -> None:
        """Takes the sums of others."""
        self.tokens += other.tokens
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            for side, value in theirs.items():
                _plus(mine, side, value)

    def lines(self) -> Iterator[str]:
        """One line a side."""
        sides = list(self.nats)
        before = math.exp(self.nats[sides[0]] / self.tokens)
        yield f"{self.tokens} tokens, {sides[0]}: perplexity {before:.4f}"
        for side in sides[1:]:
            after = math.exp(self.nats[side] / self.tokens)
            yield (
                f"  {side}: perplexity {after:.4f} ({after / before - 1:+.4%}), same choice "
                f"{self.agreed[side] / self.tokens:.3%}, "
                f"divergence {self.divergence[side] / self.tokens:.2e} nats"
            )

    def _sums(self) -> tuple[dict[str, Any], ...]:
        return self.nats, self.agreed, self.divergence


def _plus(sums: dict[str, Any], side: str, value: float) -> None:
    sums[side] = sums.get(side, 0) + value


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

    def scores(self, carry: Any, index: Tensor) -> Tensor:
        """Log-probabilities [len(index), V] of what comes behind tokens of a read."""
        found: Tensor = self.module.head(select_tokens(carry, index)).log_softmax(-1)
        return found


def make_readers(
    length: int, threads: int, sides: Sequence[str]
) -> tuple[dict[str, Reader], list[int]]:
    """Returns all sides over one model, and the text as token ids; says what the text is."""
    folder = fetch()
    source = open_source(folder)
    kernels = builtin_kernels().resolve(machine_query())
    options = BuildOptions(torch.float32, CPU, length, threads=threads)
    mesh = Mesh(Layout().place(0))
    model = assemble(source.spec, source.weights, mesh=mesh, kernels=kernels, options=options)
    readers, pages = {}, -(-length // PAGE) + 1
    for side in sides:
        shape = CacheShape(pages, PAGE, 1, torch.float32, CPU, kv_dtype=KV_DTYPES[side])
        states = allocate_states(source.spec.states, shape)
        print(f"{side}: {state_bytes(states) / pages / PAGE:.0f} bytes of cache a token")
        readers[side] = Reader(model.module, states, length)
    text = "\n\n".join(str(topics[name]) for name in sorted(topics))
    tokens = load_tokenizer(folder).encode_plain(text)
    print(
        f"text: pydoc_data.topics of Python {platform.python_version()}, {len(text)} characters, "
        f"sha256 {hashlib.sha256(text.encode()).hexdigest()}, {len(tokens)} tokens"
    )
    return readers, tokens


def score(readers: dict[str, Reader], piece: list[int], chunk: int) -> tuple[Loss, Loss]:
    """Scores a piece on all sides; the second loss takes what lies behind LONG tokens only."""
    losses = Loss(), Loss()
    for first in range(0, len(piece) - 1, chunk):
        part = piece[first : first + chunk]
        carries = {side: reader.read(part, first) for side, reader in readers.items()}
        for begin, end in _ranges(min(len(part), len(piece) - 1 - first)):
            index = torch.arange(begin, end)
            scores = {side: readers[side].scores(carry, index) for side, carry in carries.items()}
            target = torch.tensor(piece[first + begin + 1 : first + end + 1])
            losses[0].add(scores, target)
            if first + begin >= LONG:
                losses[1].add(scores, target)
    return losses


def _ranges(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, SCORED):
        yield begin, min(count, begin + SCORED)


class Sums:
    """Losses of the pieces done so far, kept in a file where one is named."""

    def __init__(self, path: Path | None, asked: dict[str, Any]) -> None:
        self.path, self.asked = path, asked
        self.pieces: list[tuple[Loss, ...]] = []
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["asked"] != asked:
                raise UsageError(f"{path} has sums of {kept['asked']}, not of {asked}")
            self.pieces = [tuple(Loss(**loss) for loss in pair) for pair in kept["pieces"]]

    def add(self, losses: tuple[Loss, ...]) -> None:
        """Takes the losses of the next piece."""
        self.pieces.append(losses)
        if self.path is not None:
            pieces = [[vars(loss) for loss in pair] for pair in self.pieces]
            self.path.write_text(json.dumps({"asked": self.asked, "pieces": pieces}))

    def total(self, which: int) -> Loss:
        """Returns the sums over all pieces."""
        found = Loss()
        for pair in self.pieces:
            found.plus(pair[which])
        return found

    def spread(self, side: str, base: str) -> str:
        """Says how far pieces lie apart: least and greatest loss, least agreement."""
        losses = [pair[0] for pair in self.pieces]
        more = [math.expm1((x.nats[side] - x.nats[base]) / x.tokens) for x in losses]
        same = [x.agreed[side] / x.tokens for x in losses]
        return (
            f"{side} over {len(losses)} pieces: perplexity {min(more):+.4%} to {max(more):+.4%}, "
            f"same choice {min(same):.3%} to {max(same):.3%}"
        )


def read_text(readers: dict[str, Reader], text: list[int], given: argparse.Namespace) -> None:
    """Scores the text piece by piece and prints what was found."""
    sides = list(readers)
    asked = {"sides": sides, "piece": given.piece, "chunk": given.chunk, "text": len(text)}
    sums = Sums(given.sums, asked)
    end = min(given.tokens, len(text))
    for start in range(len(sums.pieces) * given.piece, end - 1, given.piece):
        sums.add(score(readers, text[start : min(end, start + given.piece)], given.chunk))
        print(f"piece at {start}:", *sums.pieces[-1][0].lines(), sep="\n  ", flush=True)
    for which, name in enumerate(("all", f"behind {LONG} tokens of context")):
        if sums.total(which).tokens:
            print(f"{name}:", *sums.total(which).lines(), sep="\n  ")
    for side in sides[1:] if sums.pieces else ():
        print(sums.spread(side, sides[0]))


def time_token(readers: dict[str, Reader], piece: list[int], given: argparse.Namespace) -> None:
    """Prints what one token costs behind a piece, which every side reads first."""
    last = len(piece) - 1
    for reader in readers.values():
        for first in range(0, last, given.chunk):
            reader.read(piece[first : first + given.chunk], first)
    times = medians(
        {side: lambda r=reader: r.read(piece[last:], last) for side, reader in readers.items()},
        given.rounds,
    )
    shown = ", ".join(f"{side} {1e3 * value:.1f} ms" for side, value in times.items())
    print(f"one token behind {last}: {shown}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_352, help="of the text, from its start")
    parser.add_argument("--sums", type=Path, help="file in which sums of pieces are kept")
    parser.add_argument("--piece", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--sides", default="float32,int8,fp8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        readers, text = make_readers(given.piece, given.threads, given.sides.split(","))
        read_text(readers, text, given)
        if given.rounds:
            time_token(readers, text[: given.piece], given)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
