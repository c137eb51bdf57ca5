"""Owns /tokenize and /detokenize: what the completion endpoints would make of the same.

Knows the tokenizer and the chat format; nothing of the engine.
"""

from __future__ import annotations

import asyncio

from firstlight.errors import RequestError
from firstlight.server.chat import to_prompt
from firstlight.server.context import AppContext
from firstlight.server.request_models import DetokenizeRequest, TokenizeRequest
from firstlight.server.response_models import Detokenized, Tokenized
from firstlight.server.sampling import check_ids


async def tokenize(request: TokenizeRequest, context: AppContext) -> Tokenized:
    """Token ids of a text, or of messages as a chat completion would see them."""
    if (request.text is None) == (request.messages is None):
        raise RequestError("send either text or messages", "text")
    if request.text is not None:
        add_special = request.add_special_tokens is not False
        ids = await asyncio.to_thread(
            context.tokenizer.encode, request.text, add_special=add_special
        )
    else:
        assert request.messages is not None
        prompt = await to_prompt(
            request.messages,
            request,
            context,
            add_generation_prompt=request.add_generation_prompt is not False,
        )
        ids = prompt.token_ids
    return Tokenized(tokens=ids, count=len(ids), max_model_len=context.context_length)


async def detokenize(request: DetokenizeRequest, context: AppContext) -> Detokenized:
    """The text of token ids; control tokens are written out unless they are to be skipped."""
    check_ids(request.tokens, "tokens", context)
    skip = bool(request.skip_special_tokens)
    text = await asyncio.to_thread(context.tokenizer.decode, request.tokens, skip_special=skip)
    return Detokenized(text=text)
