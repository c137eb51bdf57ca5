"""Owns the limits within which the scheduler works; knows nothing of how they were chosen."""

import msgspec

from firstlight.errors import UsageError


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one engine, checked when made; raises UsageError naming every limit out of range.

    A step computes at most `max_batch_tokens` tokens of at most `max_sequences` sequences, and at
    most `chunk_tokens` of one sequence: small chunks keep first-token and decode latency low while
    long prompts are computed, large ones raise throughput. While answers are being written, prompts
    take at most `prompt_share` (above 0, up to 1) of a step's tokens. At most `max_waiting`
    requests queue; `context_length` is the most tokens, prompt and output, of one request.
    """

    max_sequences: int
    max_batch_tokens: int
    chunk_tokens: int
    max_waiting: int
    context_length: int
    prompt_share: float = 1.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {getattr(self, name)}, which must be at least 1"
            for name in self.__struct_fields__
            if name != "prompt_share" and getattr(self, name) < 1
        ]
        if not 0 < self.prompt_share <= 1:
            faults.append(
                f"prompt_share is {self.prompt_share}, which must be above 0 and at most 1"
            )
        # One token per sequence must fit, or a prompt could starve behind running answers.
        if self.max_batch_tokens < self.max_sequences:
            faults.append(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_sequences "
                f"({self.max_sequences}): each running sequence needs one token a step"
            )
        if self.chunk_tokens > self.max_batch_tokens:
            faults.append(
                f"chunk_tokens ({self.chunk_tokens}) is above max_batch_tokens "
                f"({self.max_batch_tokens}): no step could hold such a chunk"
            )
        if faults:
            raise UsageError("scheduler settings: " + "; ".join(faults))

    @property
    def prompt_tokens_beside_answers(self) -> int:
        """Tokens of a step that prompts may take while answers are being written; one at least, so
        that the first request advances.
        """
        return max(1, int(self.max_batch_tokens * self.prompt_share))
