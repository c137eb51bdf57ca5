"""Owns how a request's fields become sampling parameters; the model's defaults fill the gaps.

Raises RequestError naming the field when values contradict each other or the model.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

from firstlight.errors import RequestError
from firstlight.schedule.request import SamplingParams
from firstlight.server.context import AppContext
from firstlight.server.request_fields import SamplingFields

_SEED_MASK = 2**63 - 1


def to_sampling(fields: SamplingFields, context: AppContext) -> SamplingParams:
    """Sampling parameters of a request, without its length, seed and log-probabilities."""
    defaults = context.defaults
    usual = 0.0 if defaults.do_sample is False else _first(defaults.temperature, None, 1.0)
    return SamplingParams(
        max_tokens=1,
        temperature=_first(fields.temperature, usual, usual),
        top_k=max(0, int(_first(fields.top_k, defaults.top_k, 0))),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        min_tokens=fields.min_tokens or 0,
        logit_bias=_logit_bias(fields.logit_bias or {}, context),
        end_token_ids=_end_tokens(fields, context),
    )


def with_length(
    params: SamplingParams, num_prompt: int, asked: int | None, context: AppContext
) -> SamplingParams:
    """Sets the number of tokens to generate: as asked, or the rest of the context.

    Raises RequestError when prompt and tokens asked for do not fit the context.
    """
    room = context.context_length - num_prompt
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens; write at least one", "prompt", "empty_prompt")
    if room < (1 if asked is None else asked):
        wanted = "" if asked is None else f" and {asked:,} tokens were asked for"
        raise RequestError(
            f"the context of this model is {context.context_length:,} tokens, the prompt has "
            f"{num_prompt:,}{wanted}; shorten the prompt or ask for fewer tokens",
            "max_tokens" if asked is not None and room > 0 else "prompt",
            "context_length_exceeded",
        )
    max_tokens = room if asked is None else asked
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens:,} but at most {max_tokens:,} tokens are generated",
            "min_tokens",
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens)


def stop_texts(fields: SamplingFields) -> tuple[str, ...]:
    """The stop strings of a request."""
    given = fields.stop or []
    return (given,) if isinstance(given, str) else tuple(given)


def choice_seeds(seed: int | None, count: int) -> list[int]:
    """One seed for each choice, all different; the first is the request's own if it has one."""
    first = secrets.randbits(63) if seed is None else seed & _SEED_MASK
    return [first, *(_derived(first, index) for index in range(1, count))]


def check_ids(ids: Sequence[int], parameter: str, context: AppContext) -> None:
    """Raises RequestError when an id is outside the vocabulary."""
    largest = max(ids, default=0)
    if largest >= context.tokenizer.vocab_size:
        raise RequestError(
            f"token id {largest} is outside the vocabulary of {context.tokenizer.vocab_size:,}",
            parameter,
        )


def _derived(seed: int, index: int) -> int:
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


def _first(explicit: float | int | None, default: float | int | None, fallback: float) -> float:
    if explicit is not None:
        return explicit
    return default if default is not None else fallback


def _logit_bias(given: Mapping[str, float], context: AppContext) -> dict[int, float]:
    bias = {int(key): value for key, value in given.items()}
    check_ids(list(bias), "logit_bias", context)
    return bias


def _end_tokens(fields: SamplingFields, context: AppContext) -> tuple[int, ...]:
    stops = fields.stop_token_ids or []
    check_ids(stops, "stop_token_ids", context)
    own = () if fields.ignore_eos else context.end_token_ids
    return tuple(dict.fromkeys((*own, *stops)))
