"""Owns what a load run is asked to do and refuses settings that contradict each other.

Knows nothing of how the load is made or of what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from firstlight.accept.client import Api, Endpoint
from firstlight.errors import UsageError

PromptKind = Literal["random", "text"]


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count as good, in seconds; None asks nothing."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None

    @property
    def any(self) -> bool:
        """Whether anything is asked."""
        return any(v is not None for v in (self.ttft_seconds, self.tpot_seconds, self.e2e_seconds))


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One load run.

    Closed loop: `concurrency` requests are always in flight. Open loop: with `rate` (requests per
    second) arrivals follow a Poisson process, whatever the service manages. Lengths are tokens;
    `input_spread` above 0 draws lengths from a lognormal distribution whose mean is `input_tokens`
    and whose logarithm has that standard deviation.
    """

    endpoint: Endpoint
    model: str = ""
    api: Api = "completions"
    num_requests: int = 64
    concurrency: int = 8
    rate: float | None = None
    prompts: PromptKind = "random"
    input_tokens: int = 128
    input_spread: float = 0.0
    output_tokens: int = 64
    shared_prefix: float = 0.0
    token_ids: tuple[int, int] = (1000, 30000)
    ignore_eos: bool = True
    warmup_requests: int = 2
    seed: int = 0
    objectives: Objectives = Objectives()
    requests_path: Path | None = None

    def __post_init__(self) -> None:
        problems = [text for broken, text in self._rules() if broken]
        if problems:
            raise UsageError("the load cannot be made: " + "; ".join(problems))

    def _rules(self) -> list[tuple[bool, str]]:
        low, high = self.token_ids
        return [
            (self.num_requests < 1, f"{self.num_requests} requests; ask for 1 or more"),
            (self.concurrency < 1, f"concurrency {self.concurrency}; ask for 1 or more"),
            (self.rate is not None and self.rate <= 0, f"rate {self.rate}/s; it must be above 0"),
            (self.input_tokens < 1, f"{self.input_tokens} input tokens; ask for 1 or more"),
            (self.output_tokens < 1, f"{self.output_tokens} output tokens; ask for 1 or more"),
            (not 0 <= self.input_spread <= 3, f"input spread {self.input_spread}; it is 0 to 3"),
            (not 0 <= self.shared_prefix <= 1, f"shared prefix {self.shared_prefix}; it is 0 to 1"),
            (self.warmup_requests < 0, f"{self.warmup_requests} warm-up requests; 0 or more"),
            (not 0 <= low < high, f"token ids {low} to {high}; the range must not be empty"),
        ]

    @property
    def load(self) -> str:
        """The load in words."""
        if self.rate is not None:
            return f"open loop, Poisson arrivals at {self.rate:g} requests/s"
        return f"closed loop, {self.concurrency} in flight"
