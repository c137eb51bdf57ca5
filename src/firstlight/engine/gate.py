"""Owns the start-up gate: what must hold before the service calls itself ready.

Compares the service's own answers, taken on the path that requests take, with those recorded beside
the weights. Knows neither tensors nor HTTP.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from firstlight.checkpoint.known_answers import KnownAnswers, KnownCase
from firstlight.schedule.step import TokenLogprobs

# Other kernels and other summation orders may stray a few times as far as the recorded spread.
SPREAD_FACTOR = 4.0
LEAST_TOLERANCE = 2e-5
# What caches of a byte a value may add: answers are recorded without a cache. Twice what was seen
# of k3-mini and SmolLM2-135M, at tokens of probability 1e-9: 0.23 with int8, 0.80 with fp8.
CACHE_TOLERANCES = {"int8": 0.5, "fp8": 2.0}


@dataclass(frozen=True)
class GateResult:
    """What the gate found. `compared` counts positions whose top-1 had to agree, `decoded` tokens
    whose log-probability was the same decoded one by one and read at once.
    """

    passed: bool
    compared: int
    positions: int
    worst_logprob_error: float
    tolerance: float
    failures: tuple[str, ...]

    decoded: int = 0

    @property
    def summary(self) -> str:
        """One line for people."""
        verdict = "hold" if self.passed else "DO NOT HOLD"
        return (
            f"known answers {verdict}: {self.compared} of {self.positions} positions compared, "
            f"largest log-probability error {self.worst_logprob_error:.2g} "
            f"(allowed {self.tolerance:.2g}), {self.decoded} decode steps agree with prefill"
        )

    @property
    def shown_failures(self) -> str:
        """The first failures, and how many more there are."""
        more = len(self.failures) - 3
        return "; ".join(self.failures[:3]) + (f"; and {more} more" if more > 0 else "")

    def with_decoding(
        self,
        decoded: Sequence[Sequence[TokenLogprobs]],
        rescored: Sequence[Sequence[TokenLogprobs]],
    ) -> "GateResult":
        """Adds the comparison of tokens as they were decoded with the same tokens read at once.

        The last entries of each rescored sequence belong to the decoded tokens.
        """
        failures = list(self.failures)
        agreed = 0
        for index, (tokens, scores) in enumerate(zip(decoded, rescored, strict=True)):
            if not tokens or len(scores) < len(tokens):
                failures.append(f"text {index}: {len(tokens)} decode steps, {len(scores)} scores")
                continue
            for token, score in zip(tokens, scores[-len(tokens) :], strict=True):
                if abs(token.logprob - score.logprob) <= self.tolerance:
                    agreed += 1
                else:
                    failures.append(
                        f"text {index}: token {token.token_id} decoded with log-probability "
                        f"{token.logprob:.6f}, read at once it has {score.logprob:.6f}"
                    )
        return dataclasses.replace(
            self, passed=not failures, failures=tuple(failures), decoded=agreed
        )


def tolerance_for(answers: KnownAnswers, dtype: str, kv_dtype: str = "auto") -> float:
    """Returns how far a log-probability may lie from the recorded one in this dtype, with caches of
    `kv_dtype`.
    """
    spread = answers.spread.get(dtype, max(answers.spread.values(), default=0.0))
    return max(LEAST_TOLERANCE, SPREAD_FACTOR * spread) + CACHE_TOLERANCES.get(kv_dtype, 0.0)


def fit_answers(answers: KnownAnswers, context_length: int) -> KnownAnswers:
    """Returns the answers with every case cut to what a request of this context can score.

    One token of the context is the request's own answer. Cases of which nothing is left go.
    """
    longest = context_length - 1
    cases = [_cut(case, longest) for case in answers.cases]
    return msgspec.structs.replace(answers, cases=[c for c in cases if len(c.token_ids) > 1])


def compare_answers(
    answers: KnownAnswers,
    scores: Sequence[Sequence[TokenLogprobs]],
    dtype: str,
    kv_dtype: str = "auto",
) -> GateResult:
    """Compares the service's scores of every case, in order, with the recorded ones.

    A log-probability may differ by the tolerance, top-1 only where the recorded margin is smaller
    than that. A missing or non-finite value is a failure, and so is having nothing to compare.
    """
    tolerance = tolerance_for(answers, dtype, kv_dtype)
    failures: list[str] = []
    worst, compared, positions = 0.0, 0, 0
    for case, tokens in zip(answers.cases, scores, strict=True):
        if len(tokens) != len(case.top1):
            failures.append(f"{case.name}: {len(tokens)} scores for {len(case.top1)} positions")
            continue
        for index, token in enumerate(tokens):
            error = abs(token.logprob - case.logprobs[index])
            worst = max(worst, error) if error == error else float("inf")
            positions += 1
            compared += case.margins[index] > 2 * tolerance
            failures.extend(_wrong(case, index, token, tolerance))
    if not positions and not failures:
        failures.append("nothing was compared")
    return GateResult(not failures, compared, positions, worst, tolerance, tuple(failures))


def _cut(case: KnownCase, longest: int) -> KnownCase:
    return KnownCase(
        case.name,
        case.token_ids[:longest],
        case.top1[: longest - 1],
        case.margins[: longest - 1],
        case.logprobs[: longest - 1],
    )


def _wrong(case: KnownCase, index: int, token: TokenLogprobs, tolerance: float) -> list[str]:
    where = f"{case.name}, position {index + 1}"
    if not abs(token.logprob - case.logprobs[index]) <= tolerance:
        return [
            f"{where}: log-probability {token.logprob:.6f}, recorded {case.logprobs[index]:.6f}"
        ]
    top1 = token.top[0][0] if token.top else None
    if case.margins[index] > 2 * tolerance and top1 != case.top1[index]:
        return [f"{where}: most likely token {top1}, recorded {case.top1[index]}"]
    return []
