"""Owns what one word from latency to throughput means for the size of a step.

Knows no scheduler. Small steps answer sooner and stall nobody's next token; large ones read the
weights less often.
"""

from typing import NamedTuple

from firstlight.errors import UsageError


class StepLimits(NamedTuple):
    """Limits of a step: tokens of all sequences, of one prompt, and the share of the former that
    prompts may take while answers are being written.
    """

    max_batch_tokens: int
    chunk_tokens: int
    prompt_share: float


OBJECTIVES = {
    "latency": StepLimits(max_batch_tokens=512, chunk_tokens=128, prompt_share=0.25),
    "balanced": StepLimits(max_batch_tokens=2048, chunk_tokens=512, prompt_share=1.0),
    "throughput": StepLimits(max_batch_tokens=8192, chunk_tokens=4096, prompt_share=1.0),
}


def choose_limits(
    objective: str,
    *,
    max_sequences: int,
    max_batch_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> StepLimits:
    """Returns the limits of an objective; those that are given stand, and the others fit them: a
    step holds a token of each sequence and a whole chunk.

    Raises UsageError for an unknown objective.
    """
    if objective not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise UsageError(f"objective {objective} is unknown; it is one of {known}")
    limits = OBJECTIVES[objective]
    batch = max_batch_tokens or max(limits.max_batch_tokens, max_sequences, chunk_tokens or 1)
    return StepLimits(batch, chunk_tokens or min(limits.chunk_tokens, batch), limits.prompt_share)
