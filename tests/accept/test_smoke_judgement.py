"""Holds the judgement of answers and the bundled samples, without any service."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.accept.client import Answer
from firstlight.accept.samples import Sample, is_right, load_profile, profile_names
from firstlight.accept.smoke_answers import Answered, is_loop, judge_health, leaks_control
from firstlight.accept.smoke_protocol import logprobs_problem, pick_stop
from firstlight.accept.smoke_refusals import refusal_problem
from firstlight.accept.smoke_service import Malformed, Reply, Usage, read_reply


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_consistent(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert {sample.group for sample in profile.samples} == {group.name for group in profile.groups}
    assert len({sample.name for sample in profile.samples}) == len(profile.samples)
    for sample in profile.samples:
        assert sample.match == "any" or sample.accept
        assert not any(leaks_control(t, True) or is_loop(t) for t in sample.accept)


def test_shorter_types_are_allowed_more_and_unknown_ones_the_most() -> None:
    for one in load_profile("k3-mini").likelihoods:
        assert one.tolerance("float32") < one.tolerance("float16") < one.tolerance("bfloat16")
        assert one.tolerance("another") == one.tolerance("bfloat16")


@given(
    unit=st.text("ab! c", min_size=1, max_size=12).filter(str.strip),
    lead=st.text("xyz ", max_size=20),
)
def test_a_repeated_unit_is_a_loop(unit: str, lead: str) -> None:
    text = lead + unit * (1 + 80 // len(unit))
    assert is_loop(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "Hmm...",
        "1. 1\n2. 2\n3. 3\n4. 4\n5. 5\n6. 6\n7. 7\n8. 8\n9. 9",
        "The sea is a vast realm, teeming with life and full of wonders.",
        "A heading\n" + "-" * 9 + "\nand more text below it",
    ],
)
def test_plain_text_is_no_loop(text: str) -> None:
    assert not is_loop(text)


@pytest.mark.parametrize(
    ("text", "chat", "leaks"),
    [
        ("Paris<|im_end|>", True, True),
        ("[INST] hello", False, True),
        ("</s>", True, True),
        ("<\uff5cend\u2581of\u2581sentence\uff5c>", True, True),
        ("Paris.\nuser\nNext", True, True),
        ("Paris.\nuser\nNext", False, False),
        ("The user said: a < b | c > d", True, False),
        ("print(x | y)  # [1]", True, False),
    ],
)
def test_control_strings(text: str, chat: bool, leaks: bool) -> None:
    assert leaks_control(text, chat) is leaks


@given(st.text(max_size=60))
def test_a_stop_string_is_inside_the_text(text: str) -> None:
    stop = pick_stop(text)
    assert stop is None or 0 < text.index(stop) < len(text) - 3


@pytest.mark.parametrize(
    ("text", "accept", "right"),
    [("It is PARIS.", "paris", True), ("Parisian", "paris", False), ("17", "7", False)],
)
def test_answers_are_compared_as_whole_words(text: str, accept: str, right: bool) -> None:
    sample = Sample(name="s", group="g", api="chat", prompt="p", accept=(accept,))
    assert is_right(sample, text) is right


def test_unfinished_reasoning_is_not_held_against_a_model() -> None:
    sample = Sample(name="s", group="g", api="chat", prompt="p", accept=("x",))
    reply = Reply("", "let me think", "length", None, ())
    assert [check.status for check in judge_health([Answered(sample, reply)])] == ["unknown"]


def chat_logprobs(*rows: tuple[float, list[float]]) -> Reply:
    content = [
        {"token": "t", "logprob": p, "top_logprobs": [{"logprob": q} for q in top]}
        for p, top in rows
    ]
    choice: dict[str, Any] = {"logprobs": {"content": content}}
    return Reply("t" * len(rows), "", "length", Usage(1, len(rows), 1 + len(rows)), (choice,))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(-0.5, [-0.5, -2.0])], ""),
        ([(float("nan"), [-0.5])], "not finite"),
        ([(0.5, [0.5])], "above 0"),
        ([(-0.1, [-0.1, -0.2])], "sum to"),
        ([(-3.0, [-0.5, -3.0])], "greedy chose"),
    ],
)
def test_log_probabilities(rows: list[tuple[float, list[float]]], problem: str) -> None:
    found = logprobs_problem(chat_logprobs(*rows), "chat")
    assert problem in found and bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(400, {"error": {"message": "no", "type": "t"}}, ""), ""),
        (Answer(200, {}, ""), "status 200"),
        (Answer(500, {"error": {"message": "no", "type": "t"}}, ""), "status 500"),
        (Answer(422, {"detail": []}, ""), "no error object"),
        (Answer(400, {"error": {"message": " ", "type": "t"}}, ""), "no message"),
        (Answer(400, {"error": {"message": "no"}}, ""), "no type"),
    ],
)
def test_refusals(answer: Answer, problem: str) -> None:
    found = refusal_problem(answer)
    assert problem in found and bool(problem) == bool(found)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": "1"}},
    ],
)
def test_replies_of_the_wrong_shape_are_malformed(body: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_reply(Answer(200, body, ""), "completions")
