"""Holds how streams are cut into events and how addresses are read."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.accept.client import Answer, BrokenStream, Endpoint, EventParser, StreamEvent
from firstlight.errors import UsageError


@given(
    texts=st.lists(st.text(st.characters(blacklist_characters="\r\n")), max_size=6),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_events_are_the_same_however_the_bytes_arrive(
    texts: list[str], ending: str, cuts: list[int]
) -> None:
    wire = "".join(f": ping{ending}data: {json.dumps(t)}{ending}{ending}" for t in texts).encode()
    wire += b"\n" if ending == "\r" else b""
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    parser = EventParser()
    found = [e for a, b in pairwise(edges) for e in parser.feed(wire[a:b])]
    assert [json.loads(event) for event in found] == texts


def test_unicode_line_separators_do_not_cut_an_event() -> None:
    text = json.dumps("a\u2028b\x85c", ensure_ascii=False)
    assert EventParser().feed(f"data: {text}\n\n".encode()) == [text]


def test_data_over_several_lines_is_joined() -> None:
    assert EventParser().feed(b"data: a\ndata: b\n\n") == ["a\nb"]


@pytest.mark.parametrize("data", ["{", "[1]", "7"])
def test_an_event_that_is_no_object_is_refused(data: str) -> None:
    with pytest.raises(BrokenStream):
        StreamEvent(0.0, data).parse()


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_address_may_end_in_v1(url: str) -> None:
    assert Endpoint(url).root == "http://h:1"


def test_an_address_without_a_scheme_is_refused_and_the_key_stays_hidden() -> None:
    with pytest.raises(UsageError, match="no address"):
        Endpoint("localhost:8000")
    assert "secret" not in repr(Endpoint("http://h", api_key="secret"))


def test_the_message_of_an_error_body_is_found() -> None:
    assert Answer(400, {"error": {"message": "no such model"}}, "").error_message == "no such model"
    assert Answer(500, None, "boom").error_message == "boom"
