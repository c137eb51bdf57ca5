"""Kimi K3's answers are read the same whole and token by token, and no marker leaks out."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firstlight.inputs.answer_parser import Answer, AnswerDelta, ToolCall, whole_answer
from firstlight.inputs.chat_format import RenderOptions
from k3_text import k3_cases, k3_format, k3_tokenizer

CASES = k3_cases("parse")
OPEN, CLOSE, SEP, END = 387, 388, 389, 386
HI = [{"role": "user", "content": "hi"}]


def deltas(
    token_ids: Sequence[int], *, thinking: bool = True, tools: bool = True
) -> list[AnswerDelta]:
    parser = k3_format().new_parser(thinking=thinking, tools=tools)
    assert parser is not None
    return [*(parser.feed(token_id) for token_id in token_ids), parser.finish()]


def deltas_of(case: dict[str, Any], num_tokens: int | None = None) -> list[AnswerDelta]:
    tools = case["tools_in_request"] and case["tool_choice"] != "none"
    return deltas(case["token_ids"][:num_tokens], thinking=case["thinking"], tools=tools)


def as_case(answer: Answer) -> dict[str, Any]:
    calls = [
        {"name": name, "arguments": json.loads(text), "arguments_json": text}
        for name, text in answer.calls
    ]
    return {
        "reasoning": answer.reasoning or None,
        "content": answer.content or None,
        "tool_calls": calls,
    }


def wanted(case: dict[str, Any]) -> list[Any]:
    if "expected" in case:
        return [case["expected"]]
    if case["recommended"] == "any":
        return list(case["results"].values())
    return [case["results"][case["recommended"]]]


def to_ids(text: str) -> list[int]:
    """The tokens of an answer in which markers are written out."""
    return k3_tokenizer().encode(text, add_special=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_answers_are_read_as_the_reference_parsers_read_them(case: dict[str, Any]) -> None:
    assert as_case(whole_answer(deltas_of(case))) in wanted(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reasoning_comes_first_then_content_then_calls(case: dict[str, Any]) -> None:
    kinds = "".join(
        kind
        for delta in deltas_of(case)
        for kind, given in (("r", delta.reasoning), ("t", delta.content), ("c", delta.calls))
        if given
    )
    assert kinds == "".join(sorted(kinds, key="rtc".index))


@pytest.mark.parametrize(
    "case",
    # There, what was reasoning turns out to be the answer only at the end.
    [case for case in CASES if case["name"] != "skipped_think_channel"],
    ids=lambda case: case["name"],
)
def test_an_answer_cut_short_is_the_beginning_of_the_whole(case: dict[str, Any]) -> None:
    whole = whole_answer(deltas_of(case))
    for length in range(len(case["token_ids"])):
        part = whole_answer(deltas_of(case, length))
        assert whole.reasoning.startswith(part.reasoning.rstrip("\ufffd"))
        assert whole.content.startswith(part.content.rstrip("\ufffd"))
        assert whole.calls[: len(part.calls)] == part.calls


def test_a_stream_says_when_reasoning_was_the_answer() -> None:
    case = next(case for case in CASES if case["name"] == "skipped_think_channel")
    moved = [delta for delta in deltas_of(case) if delta.reasoning_was_content]
    assert [delta.content for delta in moved] == ["An answer at once."]


def test_a_call_comes_whole_with_its_closing_marker() -> None:
    case = next(case for case in CASES if case["name"] == "parallel_calls_with_text")
    ids = case["token_ids"]
    closing = [*to_ids("<|close|>call<|sep|>")]
    ends = [i for i in range(len(ids)) if ids[: i + 1][-len(closing) :] == closing]
    assert [i for i, delta in enumerate(deltas_of(case)) if delta.calls] == ends


def test_what_is_held_back_is_no_more_than_a_marker() -> None:
    text = "a <|close|>thin b<|close|>think<|sep|><|open|>response<|sep|>c<|open|> d<|sep|>e"
    given = deltas(to_ids(text))
    assert whole_answer(given) == Answer("a <|close|>thin b", "c<|open|> d<|sep|>e")
    endless = [OPEN, *to_ids("message role=" + "x " * 3000)]
    assert len(whole_answer(deltas(endless)).reasoning) > 5000


def test_text_between_elements_is_content_and_white_space_there_is_not() -> None:
    loose = to_ids("r<|close|>think<|sep|>\n\n<|open|>response<|sep|>x<|close|>response<|sep|> y")
    assert whole_answer(deltas(loose)) == Answer("r", "x y")


def test_nothing_follows_the_end_of_the_message() -> None:
    text = "<|close|>response<|sep|><|close|>message<|sep|>more<|open|>response<|sep|>more"
    assert whole_answer(deltas(to_ids(f"a{text}"), thinking=False)) == Answer("", "a")
    assert whole_answer(deltas([*to_ids("a"), END, *to_ids("b")], thinking=False)).content == "a"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("number", "NaN"),
        ("number", "1e999"),
        ("number", "9" * 5000),
        ("object", '{"a": ' * 100 + "1" + "}" * 100),
        ("array", "[" * 9000),
        ("object", '"\\ud800"'),
        ("date", "[1"),
    ],
)
def test_values_that_json_cannot_hold_stay_text(kind: str, text: str) -> None:
    argument = f'<|open|>argument key="k" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
    call = f'<|open|>call tool="f" index="1"<|sep|>{argument}<|close|>call<|sep|>'
    answer = whole_answer(deltas(to_ids(f"<|open|>tools<|sep|>{call}")))
    assert answer.calls == (ToolCall("f", json.dumps({"k": text}, ensure_ascii=False)),)


def test_where_the_next_text_belongs_is_known() -> None:
    parser = k3_format().new_parser(thinking=True, tools=True)
    assert parser is not None and parser.in_reasoning and not parser.in_content
    for token_id in to_ids("r<|close|>think<|sep|><|open|>response<|sep|>"):
        parser.feed(token_id)
    assert parser.in_content and not parser.in_reasoning


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
markup = st.sampled_from(["<|close|>argument<|sep|>", "<|close|>think<|sep|>", '"', "&amp;"])
texts = st.lists(st.text(max_size=8) | markup, max_size=4).map("".join)
calls = st.tuples(texts.filter(bool), st.dictionaries(texts, json_values | texts, max_size=4))


@given(texts, texts, st.lists(calls, max_size=3), st.booleans())
@settings(max_examples=200)
def test_what_the_format_writes_it_reads_back(
    reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    asked = RenderOptions(template_kwargs={"thinking": thinking})
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in made],
    }
    render = k3_format().render
    before = render(HI, options=asked).token_ids
    after = render([*HI, message], options=asked, add_generation_prompt=False).token_ids
    assert after[: len(before)] == before
    answer = whole_answer(deltas(after[len(before) :], thinking=thinking))
    assert answer.reasoning == (reasoning if thinking and reasoning.strip() else "")
    assert answer.content == content
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == made


garbage = st.lists(
    st.sampled_from([OPEN, CLOSE, SEP, *to_ids("think"), *to_ids("response"), *to_ids("tools")])
    | st.sampled_from([*to_ids("call"), *to_ids('argument key="k"'), *to_ids("message")])
    | st.integers(0, 700),
    max_size=60,
)


@given(garbage, st.booleans(), st.booleans())
@settings(max_examples=500)
def test_garbage_never_raises_and_only_grows(
    token_ids: list[int], thinking: bool, tools: bool
) -> None:
    found = whole_answer(deltas(token_ids, thinking=thinking, tools=tools))
    assert tools or not found.calls
    for call in found.calls:
        assert call.name and isinstance(json.loads(call.arguments), dict)
    spoken = k3_tokenizer().decode(token_ids, skip_special=False)
    assert len(found.reasoning) + len(found.content) <= len(spoken)


no_letters = [i for i in range(384) if not k3_tokenizer().token_bytes(i).isalpha()]


@given(
    st.lists(st.sampled_from([OPEN, CLOSE, SEP]) | st.sampled_from(no_letters), max_size=40),
    st.booleans(),
)
@example([OPEN, OPEN, SEP, CLOSE], True)
@settings(max_examples=500)
def test_text_without_whole_markers_is_conserved(token_ids: list[int], thinking: bool) -> None:
    found = whole_answer(deltas(token_ids, thinking=thinking))
    said = found.reasoning if thinking else found.content
    spoken = k3_tokenizer().decode(token_ids, skip_special=False)
    assert spoken.startswith(said)
    assert spoken[len(said) :] in ("", "<|open|>", "<|close|>")
