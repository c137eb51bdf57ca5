"""Whatever is chosen under a grammar's masks has the form that was asked for."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from firstlight.errors import RequestError
from firstlight.inputs.answer_parser import Answer, whole_answer
from firstlight.inputs.constraint import ConstraintFactory, TokenConstraint
from firstlight.inputs.grammar import GrammarRequest, to_grammar
from firstlight.inputs.tokenizer import load_tokenizer
from k3_text import k3_format, k3_tokenizer

VOCABULARY = 640
END = 386
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b", 3]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
AS_OBJECT = {"type": "json_object"}


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


FIND = tool(
    'find "it" & <go>',
    {
        "type": "object",
        "properties": {
            "place": {"type": "string", "enum": ["Oslo", "", "a & b"]},
            "count": {"type": ["integer", "null"]},
            "code": {"type": "string", "pattern": "^[a-c]{2}/\\d$|^none$"},
            "note": {"type": "string", "maxLength": 5},
            "mixed": {"anyOf": [{"type": "boolean"}, {"const": "maybe"}]},
            "tree": {"$ref": "#/$defs/tree"},
        },
        "required": ["place", "code", "mixed"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"type": "null"}, "n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
    },
)
PING = tool("ping", None)
FREE = tool("free", {"type": "object"})
TOOLS = [FIND, PING, FREE]


BAD_PROPERTIES: list[Any] = [
    3,
    {"type": "objec"},
    {"type": 3},
    {"type": []},
    {"enum": []},
    {"$ref": "#/no"},
    {"type": "string", "pattern": "(?=x)"},
    {"type": "string", "pattern": "^\\"},
    {"type": "string", "maxLength": "x"},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"anyOf": [{"$ref": "#/properties/a"}] * 9},
]


@pytest.fixture(scope="module")
def factory() -> ConstraintFactory:
    return ConstraintFactory(k3_tokenizer(), VOCABULARY, [END])


def allowed(constraint: TokenConstraint) -> list[int]:
    mask = constraint.mask()
    assert len(mask) == VOCABULARY // 8
    return [index for index in range(VOCABULARY) if mask[index // 8] >> index % 8 & 1]


def walk(factory: ConstraintFactory, grammar: str, seed: int) -> list[int]:
    """Chooses at random among what the masks allow, with a liking for what ends things."""
    pick = random.Random(seed)
    constraint = factory.constraint(grammar)
    closing = {END, 387, 388, 389, *(k3_tokenizer().encode_plain(c)[0] for c in '"}]')}
    ids: list[int] = []
    for _ in range(4000):
        choices = allowed(constraint)
        assert choices, "a grammar must leave something to choose"
        ending = [token_id for token_id in choices if token_id in closing]
        ids.append(pick.choice(ending if ending and pick.random() < 0.4 else choices))
        if ids[-1] == END:
            return ids[:-1]
        constraint.advance(ids[-1])
    raise AssertionError("the walk did not come to an end")


def read(ids: Sequence[int], *, thinking: bool) -> Answer:
    parser = k3_format().new_parser(thinking=thinking, tools=True)
    assert parser is not None
    return whole_answer([*map(parser.feed, ids), parser.finish()])


def request(**changes: Any) -> GrammarRequest:
    return GrammarRequest(markers=k3_format().markers)._replace(**changes)


def schema_request(schema: Any) -> GrammarRequest:
    return GrammarRequest({"type": "json_schema", "json_schema": {"schema": schema}})


def check_schema(value: Any) -> None:
    assert {"name", "kind", "sizes"} <= value.keys() <= set(SCHEMA["properties"])
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert value["kind"] in ("a", "b", 3)
    assert 1 <= len(value["sizes"]) <= 3
    assert all(type(size) is int for size in value["sizes"])
    assert isinstance(value.get("inner", {}).get("ok", True), bool)


def check_find(value: Any) -> None:
    properties = FIND["function"]["parameters"]["properties"]
    assert {"place", "code", "mixed"} <= value.keys() <= properties.keys()
    assert value["place"] in ("Oslo", "", "a & b")
    assert value.get("count") is None or type(value["count"]) is int
    assert value["code"] == "none" or value["code"][2] == "/"
    assert len(value.get("note", "")) <= 5
    assert value["mixed"] in (True, False, "maybe")
    assert type(value.get("tree", {"n": 1})["n"]) is int


@pytest.mark.parametrize("seed", range(12))
def test_plain_answers_are_json_of_the_schema(factory: ConstraintFactory, seed: int) -> None:
    ids = walk(factory, to_grammar(GrammarRequest(AS_SCHEMA)), seed)
    check_schema(json.loads(k3_tokenizer().decode(ids, skip_special=False)))


@pytest.mark.parametrize("seed", range(6))
def test_plain_answers_are_objects(factory: ConstraintFactory, seed: int) -> None:
    ids = walk(factory, to_grammar(GrammarRequest(AS_OBJECT)), seed)
    assert isinstance(json.loads(k3_tokenizer().decode(ids, skip_special=False)), dict)


@pytest.mark.parametrize("seed", range(3))
def test_any_tokenizer_can_be_held_to_a_form_below_wider_logits(
    family: Callable[[str], Path], seed: int
) -> None:
    tokenizer = load_tokenizer(family("chatml"))
    width = tokenizer.vocab_size + 45
    wide = ConstraintFactory(tokenizer, width, tokenizer.eos_ids)
    constraint = wide.constraint(to_grammar(GrammarRequest(AS_SCHEMA)))
    pick, ids = random.Random(seed), [-1]
    while ids[-1] not in tokenizer.eos_ids:
        mask = constraint.mask()
        assert len(mask) == 4 * ((width + 31) // 32)
        choices = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        assert max(choices) < tokenizer.vocab_size
        ends = [i for i in choices if tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]")]
        ids.append(pick.choice(ends if ends and pick.random() < 0.4 else choices))
        constraint.advance(ids[-1])
    check_schema(json.loads(tokenizer.decode(ids[1:-1], skip_special=False)))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_responses_are_json_and_reasoning_is_free(
    factory: ConstraintFactory, seed: int, thinking: bool
) -> None:
    grammar = to_grammar(request(response_format=AS_SCHEMA, thinking=thinking))
    ids = walk(factory, grammar, seed)
    answer = read(ids, thinking=thinking)
    check_schema(json.loads(answer.content))
    assert not answer.calls and k3_tokenizer().decode(ids, skip_special=True).count("<|open|>") == (
        1 if thinking else 0
    )


@pytest.mark.parametrize("seed", range(12))
def test_required_calls_are_made_with_typed_arguments(
    factory: ConstraintFactory, seed: int
) -> None:
    grammar = to_grammar(request(tools=TOOLS, tool_choice="required", thinking=True))
    calls = read(walk(factory, grammar, seed), thinking=True).calls
    assert calls
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == FIND["function"]["name"]:
            check_find(arguments)
        else:
            assert call.name == "free" or (call.name, arguments) == ("ping", {})


@pytest.mark.parametrize("seed", range(6))
def test_a_named_function_is_called_once(factory: ConstraintFactory, seed: int) -> None:
    choice = {"type": "function", "function": {"name": FIND["function"]["name"]}}
    grammar = to_grammar(request(tools=TOOLS, tool_choice=choice))
    (call,) = read(walk(factory, grammar, seed), thinking=False).calls
    assert call.name == FIND["function"]["name"]
    check_find(json.loads(call.arguments))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("seed", range(6))
def test_calls_are_not_parallel_when_they_must_not_be(
    factory: ConstraintFactory, seed: int, choice: str
) -> None:
    asked = request(tools=[PING], tool_choice=choice, parallel_tool_calls=False)
    calls = read(walk(factory, to_grammar(asked), seed), thinking=False).calls
    assert len(calls) == 1 or (choice == "auto" and not calls)


@pytest.mark.parametrize("seed", range(8))
def test_with_tools_an_answer_is_json_or_calls(factory: ConstraintFactory, seed: int) -> None:
    asked = request(tools=[PING], tool_choice="auto", response_format=AS_OBJECT)
    answer = read(walk(factory, to_grammar(asked), seed), thinking=False)
    assert answer.calls or isinstance(json.loads(answer.content), dict)


@pytest.mark.parametrize(
    "asked",
    [
        request(),
        request(response_format={"type": "text"}, tools=TOOLS, tool_choice="auto", thinking=True),
        request(tools=TOOLS, tool_choice="none", parallel_tool_calls=False),
        GrammarRequest(tools=TOOLS, parallel_tool_calls=False),
    ],
)
def test_what_limits_nothing_has_no_grammar(asked: GrammarRequest) -> None:
    assert to_grammar(asked) == ""


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        (GrammarRequest({"type": "xml"}), "response_format"),
        (GrammarRequest({"type": "json_schema"}), "response_format"),
        (schema_request(3), "response_format"),
        (schema_request({"type": "objec"}), "response_format"),
        (schema_request({"type": "string", "pattern": "("}), "response_format"),
        (schema_request(False), "response_format"),
        (GrammarRequest(tools=TOOLS, tool_choice="required"), "tool_choice"),
        (request(tool_choice="required"), "tool_choice"),
        (request(tools=TOOLS, tool_choice="sometimes"), "tool_choice"),
        (request(tools=TOOLS, tool_choice={"function": {"name": "other"}}), "tool_choice"),
        (request(tools=[tool("f", {"properties": 3})], tool_choice="required"), "tools"),
        (request(tools=[tool("f\ud800", {})], tool_choice="required"), "tools"),
        *[
            (
                request(tools=[tool("f", {"properties": {"a": schema}})], tool_choice="required"),
                "tools",
            )
            for schema in BAD_PROPERTIES
        ],
    ],
)
def test_what_cannot_be_kept_to_names_the_field(asked: GrammarRequest, parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_grammar(asked)
    assert caught.value.parameter == parameter


def test_a_constraint_ends_at_the_end_of_the_grammar(factory: ConstraintFactory) -> None:
    constraint = factory.constraint('start: "ab"\n')
    for token_id in k3_tokenizer().encode_plain("ab"):
        assert not constraint.finished
        constraint.advance(token_id)
    assert constraint.finished and allowed(constraint) == [END]
    constraint.advance(END)
    assert constraint.finished


def test_a_token_the_grammar_does_not_allow_is_an_error(factory: ConstraintFactory) -> None:
    constraint = factory.constraint('start: "ab"\n')
    with pytest.raises(RequestError, match=r"cannot be kept to: [^\n<]*$"):
        constraint.advance(k3_tokenizer().encode_plain("z")[0])
    with pytest.raises(RequestError):
        constraint.mask()


@pytest.mark.parametrize("grammar", ["start: nowhere\n", "no grammar", "start: <[9999]>\n"])
def test_a_bad_grammar_is_refused(factory: ConstraintFactory, grammar: str) -> None:
    with pytest.raises(RequestError, match="cannot be kept to"):
        factory.check(grammar)
    with pytest.raises(RequestError, match="cannot be kept to"):
        factory.constraint(grammar)


def test_control_tokens_are_no_text(factory: ConstraintFactory) -> None:
    constraint = factory.constraint("start: /(.|\\n)*/\n")
    assert [token_id for token_id in allowed(constraint) if token_id >= 384] == [END]


def test_any_text_may_be_a_name_a_key_or_a_value(factory: ConstraintFactory) -> None:
    odd = "\u00e9\U0001f600\n\\d\"/<|sep|>&'"
    schema = {"properties": {odd: {"enum": [odd]}}, "required": [odd]}
    grammar = to_grammar(request(tools=[tool(odd, schema)], tool_choice="required"))
    answer = read(walk(factory, grammar, 1), thinking=False)
    assert {(name, json.loads(text)[odd]) for name, text in answer.calls} == {(odd, odd)}
