"""Time one slice of Kimi K3's routed experts in MXFP4 beside dequantised weights, in one run.

Owns the shapes and the report. 16 experts of three matrices 3584 x 3072, every token chooses all of
them. Ours reads the packed codes; the other sides are torch with fp32 and with bf16 weights, expert
by expert and as batched products. Also shows what holding and calling packed experts costs.

    python benchmarks/moe_experts.py [--threads 2] [--tokens 1,16] [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from paired import Limits, measured_limits, medians

# isort: split
import torch
from torch import Tensor

from firstlight.kernels.activation import Activation
from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.kernels.mxfp4 import Mxfp4, from_mxfp4
from firstlight.kernels.reference.experts import gated_activation

EXPERTS, LATENT, INNER = 16, 3584, 3072
SITU = Activation(4.0, 25.0)
SHAPES = ((INNER, LATENT), (INNER, LATENT), (LATENT, INNER))  # w1, w3, w2
WEIGHTS = EXPERTS * 3 * LATENT * INNER

Dense = tuple[Tensor, Tensor, Tensor]


def random_experts(
    count: int, shapes: tuple[tuple[int, int], ...] = SHAPES
) -> tuple[Mxfp4, Mxfp4, Mxfp4]:
    """Return random codes with scales that keep activations of a usual size."""
    w1, w3, w2 = (
        Mxfp4(
            torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8),
            torch.randint(118, 122, (count, rows, columns // 32), dtype=torch.uint8),
        )
        for rows, columns in shapes
    )
    return w1, w3, w2


def num_bytes(experts: tuple[Mxfp4, ...]) -> int:
    """Return the bytes of codes and scales."""
    return sum(part.numel() for matrix in experts for part in matrix)


def status_bytes(field: str) -> int:
    """Return a number of bytes of this process from /proc: VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def dequantised(experts: tuple[Mxfp4, Mxfp4, Mxfp4], dtype: torch.dtype) -> Dense:
    """Return the dense weights, one expert after the other."""
    w1, w3, w2 = (
        torch.stack([from_mxfp4(Mxfp4(w.packed[e], w.scale[e]), dtype) for e in range(EXPERTS)])
        for w in experts
    )
    return w1, w3, w2


def one_by_one(x_TL: Tensor, shares_TE: Tensor, weights: Dense) -> Tensor:
    """Compute with dense weights, expert by expert, as the reference does."""
    w1, w3, w2 = weights
    out_TL = torch.zeros_like(x_TL)
    for e in range(EXPERTS):
        inner = gated_activation(x_TL @ w1[e].t(), x_TL @ w3[e].t(), SITU)
        out_TL += (inner @ w2[e].t()) * shares_TE[:, e : e + 1]
    return out_TL


def batched(x_TL: Tensor, shares_TE: Tensor, weights: Dense) -> Tensor:
    """Compute with dense weights as three batched products."""
    w1, w3, w2 = weights
    x_ETL = x_TL.expand(EXPERTS, -1, -1)
    gate, up = x_ETL @ w1.transpose(1, 2), x_ETL @ w3.transpose(1, 2)
    inner = gated_activation(gate.flatten(0, 1), up.flatten(0, 1), SITU).view_as(gate)
    out_TL: Tensor = ((inner @ w2.transpose(1, 2)) * shares_TE.t().unsqueeze(-1)).sum(0)
    return out_TL


def sides_of(
    tokens: int, experts: tuple[Mxfp4, Mxfp4, Mxfp4], dense: dict[torch.dtype, Dense]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield ours first, then torch with each dtype in both forms."""
    kernel = builtin_kernels().resolve(machine_query()).experts_mxfp4
    x_TL, shares_TE = torch.randn(tokens, LATENT), torch.rand(tokens, EXPERTS)
    ids_TE = torch.arange(EXPERTS).repeat(tokens, 1)
    yield "ours", lambda: kernel(x_TL, ids_TE, shares_TE, *experts, 0, SITU)
    for dtype, weights in dense.items():
        x, shares = x_TL.to(dtype), shares_TE.to(dtype)
        for form in (one_by_one, batched):
            name = f"{str(dtype).removeprefix('torch.')} {form.__name__}"
            yield name, lambda f=form, x=x, s=shares, w=weights: f(x, s, w)


def report(tokens: int, sides: dict[str, Callable[[], Tensor]], rounds: int, limits: Limits) -> str:
    """Time all sides and return the lines of one number of tokens."""
    exact = sides["float32 one_by_one"]()
    apart = float((sides["ours"]() - exact).abs().max() / exact.abs().max())
    times = medians(sides, rounds)
    ours = times.pop("ours")
    best = min(times, key=lambda name: times[name])
    lines = [f"{tokens} tokens: ours {ours * 1e3:.1f} ms (apart from fp32 by {apart:.1e})"]
    lines += [
        f"  {name:22} {value * 1e3:8.1f} ms  x{value / ours:.2f}" for name, value in times.items()
    ]
    packed = WEIGHTS * 17 / 32
    products = 3 * WEIGHTS * tokens  # bf16 products of an fp32 number with a code
    lines.append(
        f"  x{times[best] / ours:.2f} beside the best ({best}); "
        f"{packed / ours / limits.bytes_per_second:.0%} of bandwidth, "
        f"{products / ours / limits.bf16:.0%} of bf16 matmul"
    )
    return "\n".join(lines)


def resident(tokens: list[int]) -> tuple[tuple[Mxfp4, Mxfp4, Mxfp4], str]:
    """Return experts, and a line on the memory that holding and calling them took."""
    kernel = builtin_kernels().resolve(machine_query()).experts_mxfp4
    small = random_experts(1, ((32, 32),) * 3)
    for count in (1, 16):  # what the first calls of a process load is no cost of experts
        ids, x = torch.zeros(count, 1, dtype=torch.long), torch.randn(count, 32)
        kernel(x, ids, torch.rand(count, 1), *small, 0, SITU)
    gc.collect()
    before = status_bytes("VmRSS")
    experts = random_experts(EXPERTS)
    for count in tokens:
        ids, x = torch.arange(EXPERTS).repeat(count, 1), torch.randn(count, LATENT)
        kernel(x, ids, torch.rand(count, EXPERTS), *experts, 0, SITU)
    after, packed = status_bytes("VmHWM") - before, num_bytes(experts)
    line = f"packed {packed / 1e6:.1f} MB; peak growth {after / 1e6:.1f} MB (x{after / packed:.3f})"
    return experts, line


def main() -> int:
    """Print limits, memory and one block for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", default="1,16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens = [int(count) for count in options.tokens.split(",")]
    with torch.inference_mode():
        experts, line = resident(tokens)
        print(line)
        limits = measured_limits()
        print(f"{options.threads} threads; {limits}")
        dense = {dtype: dequantised(experts, dtype) for dtype in (torch.float32, torch.bfloat16)}
        for count in tokens:
            print(report(count, dict(sides_of(count, experts, dense)), options.rounds, limits))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
