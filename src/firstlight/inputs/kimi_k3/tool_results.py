"""Owns what Kimi K3 is shown of tool calls: their arguments, and which result belongs to which.
It knows nothing of segments or tokens.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from firstlight.errors import RequestError
from firstlight.inputs.chat_messages import function_of

Message = Mapping[str, Any]


class Arguments(NamedTuple):
    """Arguments by name, or the text that could not be read as JSON."""

    values: Mapping[str, Any]
    unreadable: str | None = None


def call_name(call: Message) -> str:
    """The function a call names; raises RequestError when it names none."""
    name = function_of(call).get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("a tool call of an assistant message names no function", "messages")
    return name


def call_arguments(call: Message) -> Arguments:
    """The arguments of a call; raises RequestError when they are JSON but no object."""
    given = function_of(call).get("arguments")
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments({})
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return Arguments({}, given)
    if not isinstance(given, Mapping):
        raise RequestError(
            f"the arguments of the call of {call_name(call)!r} must be a JSON object", "messages"
        )
    return Arguments(given)


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The messages with each run of tool results in the order of the calls they answer.

    A run is only sorted when every id in it is an id of the last assistant message's calls; then
    the calls also give the names. Of calls with the same id the first counts.
    """
    ordered: list[Message] = []
    calls: Sequence[Message] = ()
    for is_result, run in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_result:
            ordered += _sorted_results(list(run), calls)
            continue
        for message in run:
            ordered.append(message)
            if message.get("role") == "assistant":
                calls = message.get("tool_calls") or ()
    return ordered


def result_name(result: Message, calls: Sequence[Message], index: int) -> str:
    """The tool a result came from: its own word, else the call at the same place.

    `index` counts the results since the last assistant message from 1. Raises RequestError when
    neither says.
    """
    name = result.get("tool", result.get("name"))
    if name is None and index <= len(calls):
        name = call_name(calls[index - 1])
    if name is None:
        raise RequestError(
            "a tool message has no resolvable tool name: give tool_call_id of a call in the "
            "assistant message before it",
            "messages",
        )
    return str(name)


def _sorted_results(results: list[Message], calls: Sequence[Message]) -> list[Message]:
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.get("id") is not None:
            places.setdefault(str(call["id"]), place)
    found = [places.get(str(result.get("tool_call_id", result.get("id")))) for result in results]
    if any(place is None for place in found):
        return results
    pairs = sorted(
        ((place or 0, result) for place, result in zip(found, results, strict=True)),
        key=lambda pair: pair[0],
    )
    return [{**result, "tool": call_name(calls[place])} for place, result in pairs]
