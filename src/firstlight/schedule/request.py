"""Owns what a request is while it is served: its tokens, its parameters, how far it is computed.

Knows no tensor, no block and no HTTP.
"""

from enum import Enum

import msgspec

from firstlight.cache.prefix_index import PrefixChain


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Validated where the request enters, trusted afterwards.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` makes the choice depend on
    (seed, position) alone, so batch, chunking and preemption do not change it. `end_token_ids` end
    the request (the model's end tokens unless they are to be ignored, and the caller's stop ids).
    `logprobs` and `prompt_logprobs` give the number of alternatives beside the chosen token; None
    is off. `grammar` limits which tokens may come: an llguidance grammar, empty for none.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    end_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a prompt: it stands behind the placeholder tokens [first, first + count).

    `patches` are uint8 pixels [t * h * w, 3, patch, patch] of `grid` (t, h, w), before they are
    normalised; `digest` names patches and grid, and is part of the cache key of its tokens.
    """

    first: int
    count: int
    digest: str
    grid: tuple[int, int, int]
    patches: bytes


class FinishReason(str, Enum):
    """Why a request ended. `error` carries a message beside it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SubmittedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it enters the engine. `salt` and `media` are part of its cache key.

    Smaller `priority` numbers are served first. A `cache_hint` that is not empty says that other
    requests will begin alike, so its state is worth keeping; it separates nothing.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    media: tuple[MediaItem, ...] = ()
    cache_hint: str = ""


class RequestState(str, Enum):
    """Where a request stands. Waiting covers the never started and the preempted; arriving are
    those that hold blocks whose content is on its way.
    """

    WAITING = "waiting"
    ARRIVING = "arriving"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A request in the scheduler. Known tokens are prompt and output; the cache has the computed.

    Each step computed tokens catch up with known tokens; when they have, one more token is sampled.
    Ranks hold the first `num_sent` known tokens; the caller has the log-probabilities of the first
    `num_scored` prompt tokens (the first token has none). `prefix_chain` belongs to the cache.
    `shuns_tiers` is set when state outside the device was waited for in vain; `num_lost` counts how
    often such state was lost.
    """

    def __init__(self, submitted: SubmittedRequest, arrival: int) -> None:
        self.submitted = submitted
        self.request_id = submitted.request_id
        self.params = submitted.params
        self.arrival = arrival
        self.token_ids: list[int] = list(submitted.prompt_ids)
        self.num_prompt = len(submitted.prompt_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_sent = 0
        self.num_scored = 1
        self.prefix_chain: PrefixChain | None = None
        self.row: int | None = None
        self.shuns_tiers = False
        self.num_lost = 0
        self.state = RequestState.WAITING

    @property
    def precedence(self) -> tuple[int, int]:
        """Its place among requests: smaller priority numbers first, then the earlier arrival."""
        return (self.submitted.priority, self.arrival)

    @property
    def salt(self) -> str:
        """Requests of different salts share no cache content."""
        return self.submitted.salt

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """What stands behind the placeholder tokens; part of the cache keys from there on."""
        return self.submitted.media

    @property
    def most_reused(self) -> int:
        """All known tokens; where log-probabilities of the prompt are wanted and not all given yet,
        those before the one that gives the next.
        """
        if self.params.prompt_logprobs is None or self.num_scored >= self.num_prompt:
            return len(self.token_ids)
        return self.num_scored - 1

    @property
    def expects_reuse(self) -> bool:
        """True when its sender says that other requests will begin alike."""
        return bool(self.submitted.cache_hint)

    @property
    def num_known(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    def finish_reason(self) -> FinishReason | None:
        """Says whether the newest output token ends the request."""
        num_output, params = len(self.token_ids) - self.num_prompt, self.params
        if num_output == 0:
            return None
        if self.token_ids[-1] in params.end_token_ids and num_output >= params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= params.max_tokens else None
