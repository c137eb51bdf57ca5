"""Owns the grammar an answer must keep to: the parts of a request that limit its form, as text.
It knows the two shapes of answers, plain text and marked elements, but neither tokens nor engines.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from firstlight.errors import RequestError
from firstlight.inputs.chat_messages import function_of
from firstlight.inputs.element_markers import ElementMarkers
from firstlight.inputs.grammar_rules import GrammarRules
from firstlight.inputs.tool_grammar import add_calls


class GrammarRequest(NamedTuple):
    """What limits an answer.

    `markers` are the model's element markers, None for a model that answers in plain text.
    `thinking` says that the prompt leaves the reasoning open. `tools` are those of the request,
    `tool_choice` is "auto", "none", "required" or the object that names a function.
    """

    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    thinking: bool = False
    markers: ElementMarkers | None = None


def to_grammar(request: GrammarRequest) -> str:
    """An llguidance grammar (Lark form) of the whole answer, empty when nothing is limited.

    Raises RequestError naming `response_format`, `tools` or `tool_choice` for what cannot be
    turned into a grammar.
    """
    schema = response_schema(request.response_format)
    names = _wanted_tools(request)
    may_call_once = bool(request.tools) and not request.parallel_tool_calls
    limits_calls = names is not None or (may_call_once and request.tool_choice != "none")
    rules = GrammarRules()
    body = "" if schema is None else rules.json(schema, "response_format")
    if request.markers is None:
        if names is not None:
            raise RequestError(
                "this model has no form for tool calls that can be enforced; use tool_choice "
                '"auto" or "none"',
                "tool_choice",
            )
        return rules.text(start=body, where="response_format") if body else ""
    if not body and not limits_calls:
        return ""
    return _element_grammar(request, rules, body or rules.any_text(), names)


def response_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | bool | None:
    """The JSON schema a response format asks for; None for plain text.

    Raises RequestError naming `response_format` for an unknown type or a missing schema.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {kind!r}; it must be text, json_object or json_schema",
            "response_format",
        )
    given = response_format.get("json_schema")
    schema = given
    if isinstance(given, Mapping):
        schema = given.get("schema", given.get("json_schema", given))
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(
            "response_format.json_schema.schema must be an object", "response_format"
        )
    return schema


def _wanted_tools(request: GrammarRequest) -> list[str] | None:
    """Names of the tools of which one must be called; None when none must."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    declared = [function_of(tool).get("name") for tool in request.tools]
    if not declared:
        raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    if choice == "required":
        return [str(name) for name in declared]
    name = function_of(choice).get("name") if isinstance(choice, Mapping) else None
    if name is None:
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or the object that names a function',
            "tool_choice",
        )
    if name not in declared:
        raise RequestError(
            f"tool_choice names {name!r}, which is not among the tools", "tool_choice"
        )
    return [str(name)]


def _element_grammar(
    request: GrammarRequest, rules: GrammarRules, body: str, names: list[str] | None
) -> str:
    """Reasoning, response and calls in their elements, up to the end of the message."""
    markers = request.markers
    assert markers is not None, "the caller has element markers"
    free = rules.any_text()
    opened = f"{free} {markers.closed('think')} {markers.opened('response')}"
    closed = markers.closed("response")
    functions = _allowed_tools(request, names)
    several = request.parallel_tool_calls and not isinstance(request.tool_choice, Mapping)
    answer = f"{body} {closed}"
    if functions:
        calls = add_calls(rules, functions, markers, several=several)
        tools = rules.rule(f"{markers.opened('tools')} {calls} {markers.closed('tools')}")
        # A response beside calls is free: a form asked for is kept to by answers without calls.
        answer = f"{free} {closed} {tools}" + ("" if names is not None else f" | {answer}")
    whole = f"{opened if request.thinking else ''} {rules.rule(answer)}"
    where = "tools" if functions else "response_format"
    return rules.text(start=f"{whole} {markers.closed('message')}", where=where)


def _allowed_tools(request: GrammarRequest, names: list[str] | None) -> list[Mapping[str, Any]]:
    if request.tool_choice == "none":
        return []
    functions = [function_of(tool) for tool in request.tools]
    return [function for function in functions if names is None or function.get("name") in names]
