"""Time attention over latent pages at Kimi K3's shape: compiled, plain, and expanded, in one run.

Owns the shapes and the report. 96 heads over rows of 512 + 64. The absorbed form works on rows as
they lie in the cache; the expanded one first makes keys and values of 128 a head. The absorbed
sides include the two products that absorb queries and expand results, so that forms compare.

    python benchmarks/latent_attention.py [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from paired import Limits, measured_limits, medians

# isort: split
import torch
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels

HEADS, LATENT, SHARED, OWN, SLOTS = 96, 512, 64, 128, 16
SCALE = (OWN + SHARED) ** -0.5
# tokens of the step, context of each sequence, sequences
CASES = ((1, 1000, 1), (1, 8000, 1), (1, 1000, 8), (16, 2000, 1), (64, 2000, 1), (256, 2000, 1))


def sides_of(tokens: int, context: int, sequences: int) -> dict[str, Callable[[], Tensor]]:
    """Return the sides of one step over a filled cache."""
    total, pages = tokens * sequences, -(-context // SLOTS)
    q_TNK = torch.randn(total, HEADS, OWN + SHARED)
    rows_TW = torch.randn(total, LATENT + SHARED)
    expansion_NOC = torch.randn(HEADS, 2 * OWN, LATENT) * LATENT**-0.5
    rows_PSW = torch.randn(sequences * pages, SLOTS, LATENT + SHARED)
    place = (
        torch.arange(0, total + 1, tokens).int(),
        torch.full((sequences,), context).int(),
        torch.arange(sequences * pages).int().view(sequences, pages),
    )

    def absorbed(kernel: Callable[..., Tensor]) -> Tensor:
        own_NTC = q_TNK[..., :OWN].transpose(0, 1) @ expansion_NOC[:, :OWN]
        q_TNW = torch.cat((own_NTC.transpose(0, 1), q_TNK[..., OWN:]), -1)
        mixed_TNC = kernel(q_TNW, rows_TW, rows_PSW, *place, SCALE, LATENT)
        return (mixed_TNC.transpose(0, 1) @ expansion_NOC[:, OWN:].transpose(1, 2)).transpose(0, 1)

    native, plain = builtin_kernels().resolve(machine_query()), reference_kernels()
    return {
        "ours": lambda: absorbed(native.latent_attention),
        "torch absorbed": lambda: absorbed(plain.latent_attention),
        "torch expanded": lambda: plain.expanded_latent_attention(
            q_TNK, rows_TW, expansion_NOC, rows_PSW, *place, SCALE
        ),
    }


def report(case: tuple[int, int, int], rounds: int, limits: Limits) -> str:
    """Time the sides of a case and return one line."""
    tokens, context, sequences = case
    sides = sides_of(*case)
    apart = (sides["ours"]() - sides["torch expanded"]()).abs().max()
    times = medians(sides, rounds)
    ours = times["ours"]
    seen = tokens * (2 * context - tokens + 1) // 2 * sequences
    products = seen * HEADS * (2 * LATENT + SHARED) + tokens * sequences * HEADS * 2 * OWN * LATENT
    read = sequences * context * (LATENT + SHARED) * 4 + HEADS * 2 * OWN * LATENT * 4
    others = "  ".join(
        f"{name} {value * 1e3:8.2f} ms x{value / ours:.2f}"
        for name, value in times.items()
        if name != "ours"
    )
    return (
        f"{sequences} x {tokens:3d} of {context}: ours {ours * 1e3:8.2f} ms  {others}  "
        f"{products / ours / limits.fp32:.0%} of fp32 matmul, "
        f"{read / ours / limits.bytes_per_second:.0%} of bandwidth (apart by {apart:.0e})"
    )


def main() -> int:
    """Print limits and one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        limits = measured_limits()
        print(f"{options.threads} threads; {limits}")
        for case in CASES:
            print(report(case, options.rounds, limits), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
