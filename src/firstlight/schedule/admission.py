"""Owns the tests a request passes to enter the queue and to leave it for the ranks.

Each test is a function that returns what is wrong, or None. Takes nothing and changes nothing.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from firstlight.cache.cache_group import BlockCounts
from firstlight.cache.manager import CacheManager
from firstlight.errors import RequestError
from firstlight.schedule.request import Request, SubmittedRequest
from firstlight.schedule.settings import SchedulerSettings

MAX_TOKEN_ID = 2**32 - 1


class RefusalCode(str, Enum):
    """Why a request may not queue. Only `queue_full` is worth another try (429, others 400)."""

    DUPLICATE = "duplicate_request_id"
    EMPTY = "empty_prompt"
    BAD_TOKEN = "bad_token_id"
    TOO_LONG = "context_length_exceeded"
    TOO_LARGE = "cache_size_exceeded"
    QUEUE_FULL = "queue_full"


class Refusal(NamedTuple):
    """What is wrong with a request, for its sender, and which of its fields is to blame."""

    code: RefusalCode
    message: str
    parameter: str | None = None

    def to_error(self) -> RequestError:
        """The exception for the sender; its `code` is the refusal's."""
        return RequestError(self.message, parameter=self.parameter, code=self.code.value)


class Entrance(NamedTuple):
    """What the tests at the queue's entrance look at; the empty cache holds `cache_tokens`."""

    settings: SchedulerSettings
    cache_tokens: int
    num_waiting: int
    is_known: bool


def refuse_duplicate(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """An id names one unfinished request."""
    if not entrance.is_known:
        return None
    message = f"request {submitted.request_id} is being served already; each needs its own id"
    return Refusal(RefusalCode.DUPLICATE, message, "request_id")


def refuse_empty(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """Without a token there is nothing to compute."""
    if submitted.prompt_ids:
        return None
    return Refusal(RefusalCode.EMPTY, "the prompt has no token; send at least one", "prompt")


def refuse_bad_token(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """Cache keys hold token ids as 32-bit numbers; the vocabulary's own limit is tested before."""
    least, most = min(submitted.prompt_ids), max(submitted.prompt_ids)
    if least >= 0 and most <= MAX_TOKEN_ID:
        return None
    wrong = least if least < 0 else most
    message = f"the prompt contains {wrong}, which is no token id; ids are 0 to {MAX_TOKEN_ID}"
    return Refusal(RefusalCode.BAD_TOKEN, message, "prompt")


def refuse_too_long(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """Prompt and one output token must fit into the context."""
    num_tokens, most = _least_tokens(submitted), entrance.settings.context_length
    if num_tokens <= most:
        return None
    message = f"{_described(submitted)}, but the context is {most} tokens; shorten the prompt"
    return Refusal(RefusalCode.TOO_LONG, message, "prompt")


def refuse_too_large(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """Prompt and one output token must fit into the cache when nobody else uses it."""
    num_tokens, most = _least_tokens(submitted), entrance.cache_tokens
    if num_tokens <= most:
        return None
    message = (
        f"{_described(submitted)}, but the cache of this server holds {most} tokens; shorten the "
        "prompt or serve with a larger cache"
    )
    return Refusal(RefusalCode.TOO_LARGE, message, "prompt")


def refuse_full_queue(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """The queue is bounded, so that overload shows at once and not as an ever longer wait."""
    most = entrance.settings.max_waiting
    if entrance.num_waiting < most:
        return None
    message = (
        f"{entrance.num_waiting} requests are waiting and the queue holds {most}; try again later"
    )
    return Refusal(RefusalCode.QUEUE_FULL, message)


def find_refusal(submitted: SubmittedRequest, entrance: Entrance) -> Refusal | None:
    """The first reason why the request may not queue; what can never be served is said first."""
    tests: tuple[Callable[[SubmittedRequest, Entrance], Refusal | None], ...] = (
        refuse_duplicate,
        refuse_empty,
        refuse_bad_token,
        refuse_too_long,
        refuse_too_large,
        refuse_full_queue,
    )
    for test in tests:
        refusal = test(submitted, entrance)
        if refusal is not None:
            return refusal
    return None


class Hold(str, Enum):
    """Why the first waiting request stays in the queue for this step."""

    NO_ROW = "all sequence rows are taken"
    NO_TOKENS = "the step's token budget is spent"
    NO_SLOT = "all slots of recurrent state are taken"
    CONTESTED = "a running request is short of cache blocks"
    NO_BLOCKS = "too few free cache blocks"
    NO_PLACE = "the free cache blocks lie apart, and joining them copies too much"


class Room(NamedTuple):
    """What a step has left; running requests will need `reserved_blocks` of the free ones."""

    rows: int
    tokens: int
    free_blocks: BlockCounts
    reserved_blocks: BlockCounts
    is_contested: bool


def hold_for_row(room: Room) -> Hold | None:
    """A sequence needs a row on the ranks."""
    return Hold.NO_ROW if room.rows < 1 else None


def hold_for_tokens(room: Room) -> Hold | None:
    """At least one token must be computed."""
    return Hold.NO_TOKENS if room.tokens < 1 else None


def hold_for_contest(room: Room) -> Hold | None:
    """Who was just preempted, or stands still for lack of blocks, comes first."""
    return Hold.CONTESTED if room.is_contested else None


def hold_for_slot(cache: CacheManager) -> Hold | None:
    """A model with recurrent state keeps it in one slot per running sequence."""
    return None if cache.can_start else Hold.NO_SLOT


def hold_for_blocks(room: Room, needed: BlockCounts) -> Hold | None:
    """All of its known tokens must fit beside what running requests still need for theirs."""
    fits = needed.fits(room.free_blocks, beside=room.reserved_blocks)
    return None if fits else Hold.NO_BLOCKS


def find_hold(
    request: Request,
    room: Room,
    cache: CacheManager,
    lookup: Callable[[Request], int] | None = None,
) -> Hold | None:
    """The first reason why a waiting request is not admitted; the costly test comes last.

    `lookup` says how many of its tokens are taken from the cache; the cache's own by default.
    """
    hold = hold_for_row(room) or hold_for_tokens(room) or hold_for_contest(room)
    hold = hold or hold_for_slot(cache)
    if hold is not None:
        return hold
    num_tokens = min(request.num_known + 1, cache.max_tokens)
    num_cached = (lookup or cache.lookup)(request)
    hold = hold_for_blocks(room, cache.needs(request, num_tokens, num_cached=num_cached))
    if hold is None and not cache.can_place(request, num_tokens, num_cached=num_cached):
        return Hold.NO_PLACE
    return hold


def _least_tokens(submitted: SubmittedRequest) -> int:
    return len(submitted.prompt_ids) + min(1, submitted.params.max_tokens)


def _described(submitted: SubmittedRequest) -> str:
    num_prompt = len(submitted.prompt_ids)
    return f"the prompt has {num_prompt} tokens, {_least_tokens(submitted)} with the least output"
