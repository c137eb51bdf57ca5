"""Streamed text equals the whole text, and a stop string never shows in part."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import RequestError
from firstlight.inputs.output_text import OutputText
from firstlight.inputs.tokenizer import Tokenizer

TEXTS = st.text(alphabet="ab \n\u00e9\u4f60\U0001f642.", max_size=40)
STOPS = st.lists(st.text(alphabet="ab \u4f60.", min_size=1, max_size=4), max_size=3)


def streamed(output: OutputText, ids: list[int], cuts: list[int]) -> str:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    chunks = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    return "".join([*(output.feed(chunk).text for chunk in chunks), output.finish().text])


def expected_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, found letter by letter."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=150, deadline=None)
def test_text_is_the_same_for_every_chunking(
    smollm2: Tokenizer, text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    output = OutputText(smollm2, stops, include)
    whole, stop = expected_text(text, stops, include)
    assert streamed(output, smollm2.encode_plain(text), cuts) == whole
    assert output.stopped == stop


@given(st.lists(st.integers(0, 49151), max_size=20), st.lists(st.integers(0, 20), max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_ids_stream_to_their_decoding(
    smollm2: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    output = OutputText(smollm2, hidden_ids=())
    assert streamed(output, ids, cuts) == smollm2.decode(ids, skip_special=True)


def test_a_possible_stop_is_held_back_until_it_is_decided(smollm2: Tokenizer) -> None:
    output = OutputText(smollm2, [" world wide"])
    hello, world, cup = (smollm2.encode_plain(word)[0] for word in ("Hello", " world", " cup"))
    assert output.feed([hello]).text == "Hello"
    assert output.feed([world]).text == ""
    assert output.feed([cup]).text == " world cup"


def test_ids_after_a_stop_are_ignored(smollm2: Tokenizer) -> None:
    output = OutputText(smollm2, ["."])
    ids = smollm2.encode_plain("One. Two.")
    delta = output.feed(ids)
    assert (delta.text, delta.stopped) == ("One", ".")
    assert len(delta.tokens) == 2
    assert output.feed(ids) == ("", ".", ()) and output.finish().text == ""


@pytest.mark.parametrize("skip_special", [True, False])
def test_end_tokens_never_show(smollm2: Tokenizer, skip_special: bool) -> None:
    output = OutputText(smollm2, skip_special=skip_special)
    ids = [*smollm2.encode_plain("Bye"), 2]
    assert output.feed(ids).text == "Bye"


def test_special_tokens_show_when_asked(smollm2: Tokenizer) -> None:
    assert OutputText(smollm2, skip_special=False).feed([1]).text == "<|im_start|>"
    assert OutputText(smollm2).feed([1]).text == ""


def test_tokens_carry_bytes_and_offsets(smollm2: Tokenizer) -> None:
    ids = smollm2.encode_plain("A\u4f60 B")
    tokens = OutputText(smollm2).feed(ids).tokens
    assert b"".join(token.data for token in tokens).decode() == "A\u4f60 B"
    assert tokens[0].text_offset == 0
    assert tokens[-1].text_offset == 2 and tokens[-1].text == " B"


@pytest.mark.parametrize("stop", [[""], "x", [1]])
def test_stop_must_be_texts(smollm2: Tokenizer, stop: list[str]) -> None:
    with pytest.raises(RequestError, match="stop"):
        OutputText(smollm2, stop)
