"""Owns turning a chat request into work for the engine: prompt, images, grammar, parameters.

Knows the chat format; nothing of connections, or of how tokens are made or answers written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from firstlight.errors import RequestError
from firstlight.inputs.chat_format import ChatFormat
from firstlight.inputs.grammar import GrammarRequest, to_grammar
from firstlight.inputs.rendered_prompt import RenderedPrompt, RenderOptions
from firstlight.schedule.request import MediaItem, SamplingParams
from firstlight.server.answer_text import AnswerText, ParsedAnswer
from firstlight.server.chat_checks import check_abilities, check_tools, image_parts
from firstlight.server.context import AppContext
from firstlight.server.generation import Job, Prompt
from firstlight.server.message_fields import Messages, plain_messages
from firstlight.server.request_models import ChatRequest, PromptFields
from firstlight.server.sampling import stop_texts, to_sampling, with_length

if TYPE_CHECKING:
    from firstlight.inputs.images.load import PreparedImage


class ChatPrompt(NamedTuple):
    """A conversation for the engine; `thinking` says that it ends inside the model's reasoning."""

    token_ids: list[int]
    media: tuple[MediaItem, ...]
    thinking: bool


async def to_prompt(
    messages: Messages,
    fields: PromptFields,
    context: AppContext,
    *,
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """Renders a conversation in a thread, because a long one takes seconds, and its images.

    Raises RequestError when the model has no chat format or cannot take the messages.
    """
    chat_format = format_of(context)
    check_tools(fields)
    check_abilities(fields, reads_calls=chat_format.markers is not None)
    images = await _load_images(messages, chat_format, context)
    options = RenderOptions(
        reasoning_effort=fields.reasoning_effort,
        tool_choice=_tool_choice(fields),
        response_format=_response_format(fields),
        template_kwargs=fields.chat_template_kwargs or {},
        image_sizes=tuple((image.width, image.height) for image in images),
    )
    rendered = await asyncio.to_thread(
        chat_format.render,
        plain_messages(messages),
        tools=None if _hides_tools(fields, chat_format) else _tools(fields),
        add_generation_prompt=add_generation_prompt,
        options=options,
    )
    return _with_images(rendered, images)


def format_of(context: AppContext) -> ChatFormat:
    """The model's chat format; raises RequestError when it has none."""
    if context.chat_format is None:
        raise RequestError(
            "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
        )
    return context.chat_format


async def to_chat_job(request: ChatRequest, context: AppContext, completion_id: str) -> Job:
    """Checks a chat request and turns it into work for the engine; raises RequestError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    asked = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; send one of them", "max_tokens"
        )
    params = to_sampling(request, context)
    prompt = await to_prompt(request.messages, request, context)
    params = with_length(params, len(prompt.token_ids), next(iter(asked), None), context)
    if request.logprobs:
        params = msgspec.structs.replace(params, logprobs=request.top_logprobs or 0)
    params = await _with_grammar(params, request, context, thinking=prompt.thinking)
    return Job(
        completion_id=completion_id,
        prompts=(Prompt(prompt.token_ids, params, media=prompt.media),),
        num_choices=request.n or 1,
        stop=stop_texts(request),
        seed=request.seed,
        cache_salt=request.cache_salt or "",
        cache_key=request.prompt_cache_key or "",
        priority=request.priority or 0,
        new_answer=_reader(request, context, thinking=prompt.thinking),
    )


def _tools(fields: PromptFields) -> list[dict[str, Any]] | None:
    if not fields.tools:
        return None
    return [tool.model_dump(exclude_unset=True) for tool in fields.tools]


def _hides_tools(fields: PromptFields, chat_format: ChatFormat) -> bool:
    """A format that cannot say "call none" is not shown the tools then."""
    return fields.tool_choice == "none" and chat_format.markers is None


def _tool_choice(fields: PromptFields) -> str | Mapping[str, Any] | None:
    choice = fields.tool_choice
    return choice if choice is None or isinstance(choice, str) else choice.model_dump()


def _response_format(fields: PromptFields) -> Mapping[str, Any] | None:
    given = fields.response_format
    return None if given is None else given.model_dump(by_alias=True, exclude_unset=True)


async def _load_images(
    messages: Messages, chat_format: ChatFormat, context: AppContext
) -> list[PreparedImage]:
    loader = context.images
    takes_images = chat_format.takes_images and loader is not None
    found = image_parts(messages, takes_images=takes_images)
    if not found or loader is None:
        return []
    from firstlight.inputs.images.load import ImagePart

    return await loader.load([ImagePart(url, where) for url, where in found])


def _with_images(rendered: RenderedPrompt, images: list[PreparedImage]) -> ChatPrompt:
    if not images:
        return ChatPrompt(rendered.token_ids, (), rendered.thinking)
    from firstlight.inputs.images.expand import expand_images

    ids, placed = expand_images(rendered.token_ids, rendered.image_positions, images)
    media = tuple(
        MediaItem(
            first=one.first,
            count=one.count,
            digest=one.digest,
            grid=one.grid,
            patches=one.patches,
        )
        for one in placed
    )
    return ChatPrompt(ids, media, rendered.thinking)


async def _with_grammar(
    params: SamplingParams, request: ChatRequest, context: AppContext, *, thinking: bool
) -> SamplingParams:
    """Adds the grammar the answer is held to, if any; checked in a thread, as schemas may be large.

    Raises RequestError naming response_format, tools or tool_choice.
    """
    grammar = await asyncio.to_thread(
        to_grammar,
        GrammarRequest(
            response_format=_response_format(request),
            tools=_tools(request) or (),
            tool_choice=_tool_choice(request),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            thinking=thinking,
            markers=format_of(context).markers,
        ),
    )
    if grammar and request.ignore_eos:
        raise RequestError(
            "ignore_eos would go on after the end of an answer that response_format or tool_choice "
            "holds to a form; leave it out",
            "ignore_eos",
        )
    return msgspec.structs.replace(params, grammar=grammar)


def _reader(
    request: ChatRequest, context: AppContext, *, thinking: bool
) -> Callable[[], AnswerText] | None:
    """Makes readers of the model's markup; None for a model whose markup is not known here."""
    chat_format, stop = format_of(context), stop_texts(request)
    tools = bool(request.tools) and request.tool_choice != "none"
    if chat_format.new_parser(thinking=thinking, tools=tools) is None:
        return None

    def read() -> AnswerText:
        parser = chat_format.new_parser(thinking=thinking, tools=tools)
        assert parser is not None, "a chat format has a parser or has none"
        several = request.parallel_tool_calls is not False
        return ParsedAnswer(parser, stop, several_calls=several)

    return read
