"""Time prefill of Kimi Delta Attention at Kimi K3's head shape: chunks beside the recurrence.

Owns the shapes and the report. 96 heads of 128 x 128. Sides: the recurrence of the reference, token
by token in torch; the reference's chunks; the compiled kernel on the whole prompt (chunks); and the
compiled kernel in pieces so short that it goes token by token.

    python benchmarks/kda_prefill.py [--threads 2] [--tokens 2048] [--rounds 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from paired import Limits, measured_limits, medians

# isort: split
import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.kernels.reference.delta_rule import chunked_delta_rule, recurrent_delta_rule

HEADS, CHANNELS = 96, 128
LOWER_BOUND = -5.0
PIECE = 11  # tokens: goes token by token
CHUNK = 16


def random_inputs(tokens: int) -> tuple[Tensor, ...]:
    """Return q, k, v, log decay and beta as a layer makes them."""
    q, k = functional.normalize(torch.randn(2, tokens, HEADS, CHANNELS), dim=-1)
    decay = LOWER_BOUND * torch.sigmoid(torch.randn(tokens, HEADS, CHANNELS) - 3)
    v, beta = torch.randn(tokens, HEADS, CHANNELS), torch.rand(tokens, HEADS)
    return q * CHANNELS**-0.5, k, v, decay, beta


def native_in_pieces(inputs: tuple[Tensor, ...], piece: int) -> Tensor:
    """Run the compiled kernel on pieces of a prompt, the state kept in a slot between them."""
    kernel = builtin_kernels().resolve(machine_query()).delta_rule
    tokens = len(inputs[0])
    matrices, slots = torch.empty(1, HEADS, CHANNELS, CHANNELS), torch.zeros(1, dtype=torch.long)
    parts = []
    for begin in range(0, tokens, piece):
        rows = [x[begin : begin + piece] for x in inputs]
        starts = torch.tensor([0, len(rows[0])]).int()
        parts.append(kernel(*rows, starts, matrices, slots, torch.tensor([begin == 0])))
    return torch.cat(parts)


def torch_form(form: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...]) -> Tensor:
    """Run a form of the reference on the whole prompt."""
    state = torch.zeros(1, HEADS, CHANNELS, CHANNELS)
    return form(*(x.unsqueeze(0) for x in inputs), state)[0].squeeze(0)


def report(tokens: int, times: dict[str, float], limits: Limits) -> str:
    """Return one line a side, and the share of the fp32 matmul that the chunks reach."""
    base = times["torch recurrence"]
    lines = [
        f"  {name:20} {value * 1e3:9.1f} ms  {tokens / value:9.0f} tokens/s  x{base / value:.2f}"
        for name, value in times.items()
    ]
    # Products with the state: keys, queries, update; and within a chunk.
    per_head = 3 * CHANNELS * CHANNELS + CHUNK * (2 * CHANNELS + CHANNELS)
    done = per_head * HEADS * tokens / times["native chunks"]
    moved = 5 * 4 * CHANNELS * HEADS * tokens / times["native chunks"]
    lines.append(
        f"  native chunks: {done / limits.fp32:.0%} of fp32 matmul, "
        f"{moved / limits.bytes_per_second:.0%} of bandwidth, "
        f"x{times['native recurrence'] / times['native chunks']:.2f} beside native recurrence"
    )
    return "\n".join(lines)


def main() -> int:
    """Print limits, how far results are apart, and one line a side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        limits = measured_limits()
        print(f"{options.threads} threads; {limits}")
        inputs = random_inputs(options.tokens)
        sides: dict[str, Callable[[], Tensor]] = {
            "torch recurrence": lambda: torch_form(recurrent_delta_rule, inputs),
            "torch chunks": lambda: torch_form(chunked_delta_rule, inputs),
            "native recurrence": lambda: native_in_pieces(inputs, PIECE),
            "native chunks": lambda: native_in_pieces(inputs, options.tokens),
        }
        apart = (sides["native chunks"]() - sides["native recurrence"]()).abs().max()
        print(f"{options.tokens} tokens, {HEADS} heads; both native forms apart by {apart:.1e}")
        print(report(options.tokens, medians(sides, options.rounds), limits))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
