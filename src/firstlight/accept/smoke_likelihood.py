"""Owns the finest of the known answers: how likely a model finds each token of a text.

Knows nothing of how numbers were recorded. A damaged part that changes no word moves these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firstlight.accept.report import Check
from firstlight.accept.samples import Likelihood
from firstlight.accept.smoke_service import Malformed, Service

_FIX = (
    "the weights, or a part of the computation, are not those of the profile's model, "
    "or the service computes in another type than --dtype says"
)


async def check_likelihood(service: Service, one: Likelihood, dtype: str) -> Check:
    """Whether a service that computes in `dtype` finds the text's tokens as likely as recorded, on
    average.

    Raises Refused and Malformed as `ask_likelihood`.
    """
    name = f"likelihood of {one.name}"
    if "completions" not in service.apis:
        return Check(name, "unknown", "needs plain completions with echo, which are not offered")
    found = await ask_likelihood(service, one.text)
    if len(found) != len(one.logprobs):
        detail = f"{len(found)} tokens, {len(one.logprobs)} recorded: another tokenizer?"
        return Check(name, "fail", detail, _FIX)
    error = mean_difference(found, one.logprobs)
    allowed = one.tolerance(dtype)
    detail = f"{len(found)} tokens, off by {error:.4f} on average; {dtype} allows {allowed:g}"
    if error > allowed:
        return Check(name, "fail", detail, _FIX)
    return Check(name, "ok", detail)


async def ask_likelihood(service: Service, text: str) -> list[float]:
    """Log-probability of each token of a text but the first, natural logarithm.

    Raises Refused when the service scores no prompts, Malformed on another shape.
    """
    reply = await service.ask("completions", text, max_tokens=1, echo=True, logprobs=1)
    block: Any = reply.choices[0].get("logprobs")
    rows = block.get("token_logprobs") if isinstance(block, dict) else None
    if not isinstance(rows, list) or len(rows) < 3:
        raise Malformed(f"no log-probabilities of the prompt: {block!r:.120}")
    scores = rows[1:-1]  # the first has none, the last is the generated one
    if not all(isinstance(score, (int, float)) for score in scores):
        raise Malformed(f"a token without a log-probability: {scores!r:.120}")
    return [float(score) for score in scores]


def mean_difference(found: Sequence[float], recorded: Sequence[float]) -> float:
    """The mean of the absolute differences of two lists of equal length."""
    return sum(abs(a - b) for a, b in zip(found, recorded, strict=True)) / len(found)
