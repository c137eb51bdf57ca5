"""Time the native kernels beside stock torch, at the shapes of SmolLM2-135M, in one run.

Owns the shapes and the report; refuses to know how kernels are chosen or built. Weights rotate
over more memory than the caches hold, as in a model. Shares are of this machine's limits, measured
in the same run: bytes read per second, and fp32 multiply-adds per second of one large torch matmul.
With one thread its CPU time is taken, so that other work on the machine disturbs less; the best of
many calls counts.

    python benchmarks/kernels.py [--threads 2] [--rows 1,8,128] [--only linear] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Threads of torch that spin after its turn would take the cores of the other side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from firstlight.kernels.builtin import (
    builtin_kernels,
    machine_query,
    reference_kernels,
)
from firstlight.kernels.packed_weight import PackedMlp, PackedWeight, pack_weight
from firstlight.kernels.registry import KernelSet

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 576, 9, 3, 64, 1536, 49152
COLD_BYTES = 600 << 20
SLOTS = 16


@dataclass(frozen=True)
class Case:
    """One call to time: what it reads and multiplies, and how to make it for a kernel set."""

    operation: str
    rows: int
    read_bytes: int
    multiplications: int
    call: Callable[[KernelSet, int], object]
    note: str = ""


@dataclass(frozen=True)
class Limits:
    """What this machine reaches: bytes read and fp32 multiply-adds per second."""

    bytes_per_second: float
    multiplications_per_second: float


def _seconds(call: Callable[[int], object], least: float) -> float:
    """Return the best time of one call, repeated for at least so many seconds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call(0)
    best, start, index = float("inf"), clock(), 1
    while clock() - start < least or index < 4:
        begin = clock()
        call(index)
        best = min(best, clock() - begin)
        index += 1
    return best


def measured_limits(seconds: float) -> Limits:
    """Measure a plain sum over cold memory and one large matmul."""
    cold = torch.ones(COLD_BYTES // 4)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    read = _seconds(lambda _: cold.sum(), seconds)
    multiplied = _seconds(lambda _: left @ right, seconds)
    return Limits(COLD_BYTES / read, 1024**3 / multiplied)


def linear_cases(rows: int) -> Iterator[Case]:
    """Yield the linear maps of one layer and of the head."""
    widths = HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD
    per_set = HIDDEN * (sum(widths) + HIDDEN + 2 * INNER) + INNER * HIDDEN
    sets = max(2, COLD_BYTES // (4 * per_set))
    qkv = [tuple(torch.randn(n, HIDDEN) for n in widths) for _ in range(sets)]
    out = [torch.randn(HIDDEN, HIDDEN) for _ in range(sets)]
    gate_up = [(torch.randn(INNER, HIDDEN), torch.randn(INNER, HIDDEN)) for _ in range(sets)]
    down = [torch.randn(HIDDEN, INNER) for _ in range(sets)]
    x, inner, residual = (torch.randn(rows, n) for n in (HIDDEN, INNER, HIDDEN))
    none = (None, None, None)

    def case(operation: str, weights: int, call: Callable[[KernelSet, int], object]) -> Case:
        return Case(operation, rows, weights * 4, weights * rows, call)

    yield case(
        "linear_group", HIDDEN * sum(widths), lambda k, i: k.linear_group(x, qkv[i % sets], none)
    )
    yield case("linear", HIDDEN * HIDDEN, lambda k, i: k.linear(x, out[i % sets], None))
    yield case(
        "gated_mlp_in",
        2 * INNER * HIDDEN,
        lambda k, i: k.gated_mlp_in(x, *gate_up[i % sets], None, None),
    )
    yield case(
        "linear_add",
        INNER * HIDDEN,
        lambda k, i: k.linear_add(inner, down[i % sets], None, residual),
    )


def head_cases(rows: int) -> Iterator[Case]:
    """Yield the vocabulary projection and the greedy choice, for at most 32 rows."""
    if rows > 32:
        return
    heads = [torch.randn(VOCABULARY, HIDDEN) for _ in range(6)]
    x, logits = torch.randn(rows, HIDDEN), torch.randn(rows, VOCABULARY)
    size = VOCABULARY * HIDDEN
    yield Case(
        "linear", rows, size * 4, size * rows, lambda k, i: k.linear(x, heads[i % 6], None), "head"
    )
    yield Case("greedy", rows, rows * VOCABULARY * 4, 0, lambda k, _: k.greedy(logits))


def packed_weight(rows: int, columns: int, levels: int) -> tuple[Tensor, PackedWeight]:
    """Return a weight of 16 (affine4) or 255 (scaled8) levels a block, dense and packed."""
    q = torch.randint(0, 16, (rows, columns // 32, 32)).float()
    q[..., 0], q[..., 1] = 0, levels // 2 if levels > 16 else 15
    dense = q * (torch.rand(rows, columns // 32, 1) + 0.01).half().float()
    if levels == 16:
        dense += torch.randn(rows, columns // 32, 1).half().float()
    dense = dense.view(rows, columns)
    native = builtin_kernels().resolve(machine_query())
    return dense, pack_weight(dense, native.pack_weight_as)


def packed_cases(rows: int) -> Iterator[Case]:
    """Yield packed weights beside torch on the dense ones: a feed-forward, and the head."""
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    sets = [[packed_weight(*shape, 16) for shape in shapes] for _ in range(30)]
    handles = [PackedMlp(one[0][1], one[1][1], one[2][1]) for one in sets]
    x = torch.randn(rows, HIDDEN)

    def mlp(kernels: KernelSet, index: int) -> Tensor:
        out: Tensor
        if kernels.packs_weights:
            out = kernels.packed_mlp(x, handles[index % 30])
        else:
            gate, up, down = (dense for dense, _ in sets[index % 30])
            out = kernels.linear(kernels.gated_mlp_in(x, gate, up), down)
        return out

    size = sum(p.num_bytes for p in handles[0][:3])
    yield Case("packed_mlp", rows, size, 3 * INNER * HIDDEN * rows, mlp, handles[0].up.format)
    if rows > 32:
        return
    heads = [packed_weight(VOCABULARY, HIDDEN, 255) for _ in range(3)]

    def head(kernels: KernelSet, index: int) -> Tensor:
        dense, packed = heads[index % 3]
        out: Tensor
        if kernels.packs_weights:
            out = kernels.packed_linear(x, packed)
        else:
            out = kernels.linear(x, dense)
        return out

    packed = heads[0][1]
    yield Case(
        "packed_linear", rows, packed.num_bytes, VOCABULARY * HIDDEN * rows, head, packed.format
    )


def row_cases(rows: int) -> Iterator[Case]:
    """Yield norms and rotation."""
    x, residual, weight = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), torch.randn(HIDDEN)
    q, k = torch.randn(rows, HEADS, HEAD), torch.randn(rows, KV_HEADS, HEAD)
    positions, table = torch.arange(rows), torch.rand(8192, HEAD // 2)
    bytes_of = rows * HIDDEN * 4
    yield Case("rms_norm", rows, bytes_of, 0, lambda s, _: s.rms_norm(x, weight, 1e-5))
    yield Case(
        "add_rms_norm",
        rows,
        2 * bytes_of,
        0,
        lambda s, _: s.add_rms_norm(x, residual, weight, 1e-5),
    )
    yield Case("rotary", rows, 0, 0, lambda s, _: s.rotary(q, k, positions, table, table))


def attention_case(tokens: int, context: int, sequences: int) -> Case:
    """Return paged attention of equal sequences; rotation included."""
    rows = tokens * sequences
    pages = -(-context // SLOTS)
    keys, values = torch.randn(2, sequences * pages, KV_HEADS, SLOTS, HEAD)
    table = torch.arange(sequences * pages).int().view(sequences, pages)
    q, k = torch.randn(rows, HEADS, HEAD), torch.randn(rows, KV_HEADS, HEAD)
    starts = torch.arange(0, rows + 1, tokens).int()
    contexts = torch.full((sequences,), context).int()
    positions = torch.arange(context - tokens, context).repeat(sequences)
    rotation = torch.rand(8192, HEAD // 2)
    seen = tokens * (2 * context - tokens + 1) // 2 * sequences

    def call(kernels: KernelSet, _: int) -> Tensor:
        out: Tensor = kernels.rotary_paged_attention(
            q, k, k, positions, rotation, rotation, keys, values,
            starts, contexts, table, 0.125, None,
        )  # fmt: skip
        return out

    read = sequences * context * KV_HEADS * HEAD * 8
    note = f"{sequences} x {tokens} of {context}"
    return Case("rotary_paged_attention", rows, read, seen * HEADS * HEAD * 2, call, note)


def attention_cases() -> Iterator[Case]:
    """Yield decode and prefill steps."""
    yield attention_case(1, 1000, 1)
    yield attention_case(1, 8000, 1)
    yield attention_case(1, 500, 32)
    yield attention_case(128, 128, 1)
    yield attention_case(512, 2048, 1)
    yield attention_case(4000, 4000, 1)


def report(case: Case, limits: Limits, seconds: float) -> str:
    """Time both sides of a case and return one line."""
    plain, native = reference_kernels(), builtin_kernels().resolve(machine_query())
    ours = _seconds(lambda i: case.call(native, i), seconds)
    theirs = _seconds(lambda i: case.call(plain, i), seconds)
    bandwidth = case.read_bytes / ours / limits.bytes_per_second
    compute = case.multiplications / ours / limits.multiplications_per_second
    return (
        f"{case.operation:24}{case.note:18}{case.rows:6d} rows  torch {theirs * 1e6:9.1f} us  "
        f"ours {ours * 1e6:9.1f} us  x{theirs / ours:6.2f}  "
        f"{bandwidth:5.0%} of bandwidth  {compute:5.0%} of fp32 matmul"
    )


def main() -> int:
    """Print the limits, what was chosen, and one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,4,8,32,128,512,2048")
    parser.add_argument("--only", default="", help="an operation's name or a part of it")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each side")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("\n".join(builtin_kernels().resolve(machine_query()).describe()))
    with torch.inference_mode():
        limits = measured_limits(options.seconds)
        print(
            f"limits with {options.threads} threads: "
            f"{limits.bytes_per_second / 1e9:.1f} GB/s read, "
            f"{limits.multiplications_per_second / 1e9:.0f} G multiply-adds/s in torch"
        )
        for rows in map(int, options.rows.split(",")):
            for cases in (linear_cases, head_cases, packed_cases, row_cases):
                for case in cases(rows):
                    if options.only in case.operation:
                        print(report(case, limits, options.seconds), flush=True)
        for case in attention_cases():
            if options.only in case.operation:
                print(report(case, limits, options.seconds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
