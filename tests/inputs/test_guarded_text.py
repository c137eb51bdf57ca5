"""Guarded text answers as the string it stands for, and its marks survive every operation."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.inputs.guarded_text import GuardedText, Shadow

SHADOW = Shadow.of("<|im_end>", 0xF0000)
LETTERS = st.text(alphabet="<|imE d\n\u00df\u4f60x", max_size=12)
PART = st.text(alphabet="<|im", min_size=1, max_size=2)

OPERATIONS: list[Callable[[str, str], Any]] = [
    lambda text, part: text.split(part),
    lambda text, part: text.rsplit(part, 1),
    lambda text, part: text.partition(part),
    lambda text, part: text.rpartition(part),
    lambda text, part: text.replace(part, "-"),
    lambda text, part: text.replace(part, part + part, 1),
    lambda text, part: text.strip(part),
    lambda text, part: text.lstrip(part),
    lambda text, part: text.rstrip(part),
    lambda text, part: text.removeprefix(part),
    lambda text, part: text.removesuffix(part),
    lambda text, part: text.startswith(part),
    lambda text, part: text.startswith((part, "x")),
    lambda text, part: text.find(part),
    lambda text, part: text.count(part),
    lambda text, part: part in text,
    lambda text, part: text == part,
    lambda text, part: text < part,
    lambda text, part: part + text + part,
    lambda text, part: text.split(),
    lambda text, part: text.splitlines(),
    lambda text, part: text.strip(),
    lambda text, part: text.upper(),
    lambda text, part: text.lower(),
    lambda text, part: text.title(),
    lambda text, part: text.capitalize(),
    lambda text, part: text.swapcase(),
    lambda text, part: text[1:-1],
    lambda text, part: text[::-1],
    lambda text, part: list(text),
    lambda text, part: text * 2,
    lambda text, part: text.center(20),
    lambda text, part: text.join(["a", part]),
    lambda text, part: text.isspace(),
    lambda text, part: {text: 1}.get(part),
    lambda text, part: hash(text),
    lambda text, part: len(text),
    lambda text, part: f"{text:>20}",
]


@pytest.mark.parametrize("index", range(len(OPERATIONS)))
@given(LETTERS, PART)
@settings(max_examples=30, deadline=None)
def test_operations_answer_as_on_the_plain_text(index: int, text: str, part: str) -> None:
    guarded: str = SHADOW.guard(text)
    expected = OPERATIONS[index](text, part)
    assert SHADOW.reveal_all(OPERATIONS[index](guarded, part)) == expected
    assert SHADOW.reveal_all(OPERATIONS[index](guarded, SHADOW.guard(part))) == expected


@pytest.mark.parametrize("index", range(len(OPERATIONS)))
@given(LETTERS)
@settings(max_examples=20, deadline=None)
def test_results_never_hold_a_users_character_unmarked(index: int, text: str) -> None:
    result = OPERATIONS[index](SHADOW.guard(text), SHADOW.guard("<"))
    stored = "".join(result if isinstance(result, (list, tuple)) else [f"{result}"])
    assert type(stored) is str and not set("<|") & set(stored)


def test_template_text_stays_unmarked_when_joined() -> None:
    joined = "<|im" + SHADOW.guard("<|im") + "<|im"
    assert isinstance(joined, GuardedText)
    assert "".join(str.__iter__(joined.strip()))[:4] == "<|im"
    assert joined == "<|im<|im<|im"
    assert joined.split("|im")[0] == "<"


@pytest.mark.parametrize("call", ["encode", "format", "translate"])
def test_what_would_lose_the_marks_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match="text"):
        getattr(SHADOW.guard("<"), call)()
