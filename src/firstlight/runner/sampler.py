"""Owns the choice of the next token from logits; knows neither model nor cache.

The choice depends on (seed, position) and the row's own logits alone, so batch composition,
chunking and preemption cannot change it. Order of operations: bias, penalties, the tokens a grammar
allows, temperature, top-k, top-p, min-p, as transformers' logits processors have it. Shape letters:
S rows that sample, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels.registry import KernelSet
from firstlight.schedule.request import SamplingParams
from firstlight.schedule.step import TokenLogprobs

# Nucleus and min-p thresholds are looked for among this many candidates before all are sorted.
CANDIDATES = 1024


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know of a row: parameters, all known tokens, where output begins.

    `allowed_V` (bool) limits the choice; at least one token is allowed. None allows every token.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt: int
    allowed_V: Tensor | None = None


def sample(logits_SV: Tensor, rows: Sequence[SampleRow], kernels: KernelSet) -> list[int]:
    """Returns one token id for each row. `logits_SV` is fp32 and is not changed."""
    if all(_is_plain_greedy(row) for row in rows):
        ids_S, _ = kernels.greedy(logits_SV)
        return [int(i) for i in ids_S.tolist()]  # the step's one host sync
    adjusted_SV = torch.stack([_adjust(logits_SV[i], row) for i, row in enumerate(rows)])
    ids_S = adjusted_SV.argmax(-1)
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        ids_S[random] = _draw(adjusted_SV[random], [rows[i] for i in random])
    return [int(i) for i in ids_S.tolist()]


def allowed_tokens(bits: bytes, vocabulary: int, device: torch.device) -> Tensor:
    """Returns the mask `bits` (token i is bit i % 8 of byte i // 8) as bool [vocabulary].

    Logits are often padded beyond the tokenizer's last token: what has no bit is not allowed.
    """
    bytes_B = torch.frombuffer(bytearray(bits), dtype=torch.uint8) if bits else torch.zeros(0)
    shifts_8 = torch.arange(8, dtype=torch.uint8)
    given = bytes_B.to(torch.uint8).unsqueeze(1).bitwise_right_shift(shifts_8).bitwise_and(1)
    allowed_V = torch.zeros(vocabulary, dtype=torch.bool)
    count = min(vocabulary, given.numel())
    allowed_V[:count] = given.flatten()[:count].bool()
    return allowed_V.to(device)


def token_logprobs(
    logits_SV: Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Returns log-probabilities of given tokens and of the `num_top` most likely ones, per row.

    Computed in fp32 from the logits as the model gave them.
    """
    logprobs_SV = torch.log_softmax(logits_SV.float(), -1)
    chosen_S1 = torch.tensor(token_ids, device=logits_SV.device).unsqueeze(1)
    picked_S1 = logprobs_SV.gather(1, chosen_S1)
    ranks = (logprobs_SV > picked_S1).sum(1).add(1).tolist()
    values_SK, ids_SK = logprobs_SV.topk(num_top, -1) if num_top else (picked_S1, chosen_S1)
    tops = zip(ids_SK.tolist(), values_SK.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, rank, list(zip(*top, strict=True)) if num_top else [])
        for token, value, rank, top in zip(
            token_ids, picked_S1.squeeze(1).tolist(), ranks, tops, strict=True
        )
    ]


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) that depends on (seed, position) only (SplitMix64, Steele
    2014).
    """
    mask = (1 << 64) - 1
    state = ((seed & mask) * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & mask
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def _is_plain_greedy(row: SampleRow) -> bool:
    params = row.params
    penalised = params.presence_penalty or params.frequency_penalty or params.logit_bias
    limited = row.allowed_V is not None or len(row.token_ids) - row.num_prompt < params.min_tokens
    return not (params.temperature > 0 or penalised or params.repetition_penalty != 1 or limited)


def _adjust(logits_V: Tensor, row: SampleRow) -> Tensor:
    """Bias, penalties, what a grammar allows, and end tokens held back until `min_tokens`."""
    params, out_V = row.params, logits_V.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=out_V.device)
        out_V[ids] += torch.tensor(list(params.logit_bias.values()), device=out_V.device)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.token_ids)), device=out_V.device)
        values = out_V[seen]
        factor = params.repetition_penalty
        out_V[seen] = torch.where(values > 0, values / factor, values * factor)
        out_V.clamp_(max=torch.finfo(out_V.dtype).max)  # a tiny penalty must not make infinities
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(row.token_ids[row.num_prompt :], dtype=torch.int64)
        ids, counts = torch.unique(output, return_counts=True)
        ids, counts = ids.to(out_V.device), counts.to(out_V.device)
        out_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if row.allowed_V is not None:
        out_V = out_V.masked_fill(~row.allowed_V, float("-inf"))
    if len(row.token_ids) - row.num_prompt < params.min_tokens and params.end_token_ids:
        longer_V = out_V.clone()
        longer_V[list(params.end_token_ids)] = float("-inf")
        # A grammar at its end leaves nothing but an end token: then the text ends early.
        if row.allowed_V is None or bool(longer_V.isfinite().any()):
            return longer_V
    return out_V


def _draw(logits_SV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Inverse transform sampling in vocabulary order from the truncated distribution."""
    scaled_SV = _scaled(logits_SV, [row.params.temperature for row in rows])
    floors_S1 = _floors(scaled_SV, rows)
    if floors_S1 is not None:
        scaled_SV = scaled_SV.masked_fill(scaled_SV < floors_S1, float("-inf"))
    # On the host: accelerators lack operators of float64, and the running sums need it.
    sums_SV = torch.softmax(scaled_SV, -1).cpu().cumsum(-1, dtype=torch.float64)
    draws = [uniform(row.params.seed, len(row.token_ids)) for row in rows]
    targets_S1 = torch.tensor(draws, dtype=torch.float64).unsqueeze(1)
    # right=True: the first token whose running sum exceeds the draw, so one of zero probability
    # is never chosen.
    found_S1 = torch.searchsorted(sums_SV, targets_S1 * sums_SV[:, -1:], right=True)
    return found_S1.squeeze(1).clamp_(max=logits_SV.shape[1] - 1).to(logits_SV.device)


def _scaled(logits_SV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Logits below the row's largest over the temperature: finite or -inf however small it is."""
    least = torch.finfo(logits_SV.dtype).tiny
    wanted = torch.tensor([max(least, one) for one in temperatures], device=logits_SV.device)
    return (logits_SV - logits_SV.amax(-1, keepdim=True)) / wanted.unsqueeze(1)


def _floors(scaled_SV: Tensor, rows: Sequence[SampleRow]) -> Tensor | None:
    """The least logit each row keeps under top-k, top-p and min-p; None when nothing truncates."""
    wanted = [_truncates(row.params) for row in rows]
    if not any(wanted):
        return None
    vocabulary = scaled_SV.shape[1]
    num_candidates = min(vocabulary, max([CANDIDATES] + [row.params.top_k for row in rows]))
    while True:
        values_SC, _ = scaled_SV.topk(num_candidates, -1)
        totals_S = torch.logsumexp(scaled_SV, -1)
        floors = [
            _floor(values_SC[i], totals_S[i], rows[i].params, num_candidates == vocabulary)
            if wanted[i]
            else float("-inf")
            for i in range(len(rows))
        ]
        if None not in floors:
            return torch.tensor(floors, device=scaled_SV.device).unsqueeze(1)
        num_candidates = vocabulary


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _floor(values_C: Tensor, total: Tensor, params: SamplingParams, complete: bool) -> float | None:
    """One row's floor from its largest logits in descending order; None if more are needed."""
    kept = values_C[: params.top_k] if params.top_k else values_C
    if params.top_p < 1:
        mass = torch.logsumexp(kept, 0) if params.top_k else total
        sums_C = (kept - mass).exp().cumsum(0)
        enough = int((sums_C < params.top_p).sum()) + 1
        if enough > len(kept) and not complete and not params.top_k:
            return None
        kept = kept[:enough]
    floor = float(kept[-1]) if params.top_k or params.top_p < 1 else float("-inf")
    if params.min_p > 0:
        least = float(values_C[0]) + torch.log(torch.tensor(params.min_p)).item()
        floor = max(floor, least)
    return floor
