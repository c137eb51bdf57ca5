"""How a user says which tokens attention reads, and what layers then keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import UsageError
from firstlight.sharding.attention_pattern import (
    FULL,
    AttentionPattern,
    check_pages,
    parse_attention,
    patterns_of,
    with_pattern,
)
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    cached_token_bytes,
)

RECURRENT = RecurrentState(4, 32, 32, 384, 3)
HYBRID = (RECURRENT, LatentState(144), RECURRENT, LatentState(144))
NUMBERS = st.integers(1, 10_000)
PATTERNS = st.one_of(
    st.just(FULL),
    st.builds(AttentionPattern, window=NUMBERS, sinks=st.integers(0, 100)),
    st.builds(
        AttentionPattern, block=NUMBERS, blocks=st.integers(0, 99), recent=NUMBERS, sinks=NUMBERS
    ),
)


@given(PATTERNS)
def test_what_a_pattern_says_of_itself_is_read_back(pattern: AttentionPattern) -> None:
    (rule,) = parse_attention(str(pattern))
    assert rule == (None, pattern)


def test_the_first_rule_that_names_a_layer_holds_and_linear_layers_stay_as_they_are() -> None:
    rules = parse_attention("1: sparse=64x32; *: window=4096,sinks=4")
    sparse = AttentionPattern(block=64, blocks=32, recent=256, sinks=64)
    window = AttentionPattern(window=4096, sinks=4)
    assert patterns_of(rules, HYBRID) == (FULL, sparse, FULL, window)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none", "'none' is not understood"),
        ("", "'' is not understood"),
        ("window=0", "window=0 is no number of tokens from 1 on"),
        ("window=4096,recent=3", "is no pattern with recent"),
        ("sparse=64", "is not TOKENSxBLOCKS"),
        ("sparse=0x4", "is not TOKENSxBLOCKS"),
        ("window=1,sinks=1,sinks=2", "'sinks=2' is not understood"),
        ("x: full", "'x' is no layer"),
        ("3-1: full", "'3-1' is no layer"),
        (": full", "names no layer"),
    ],
)
def test_texts_that_say_nothing_are_refused_by_their_part(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_attention(text)
    assert said in str(caught.value)
    assert "write for example" in str(caught.value)


def test_rules_for_layers_that_cannot_follow_them_are_refused() -> None:
    for text, said in (
        ("4: full", "layers 0 to 3"),
        ("0: window=8", "layer 0 keeps a recurrent state"),
    ):
        with pytest.raises(UsageError, match=said):
            patterns_of(parse_attention(text), HYBRID)
    own = (GroupedQueryState(2, 64, window=512),)
    with pytest.raises(UsageError, match="window of 512 tokens of its own"):
        patterns_of(parse_attention("0: sparse=64x2"), own)
    assert patterns_of(parse_attention("sparse=64x2"), own) == (FULL,)
    with pytest.raises(UsageError, match="not whole pages of 16"):
        check_pages((AttentionPattern(block=24, blocks=1),), 16)


def test_a_window_is_charged_at_its_size_and_a_choice_by_its_summaries() -> None:
    latent = LatentState(144)
    window = with_pattern(latent, AttentionPattern(window=64, sinks=4), 16)
    assert (window.window, window.sinks) == (64, 4)
    sparse = with_pattern(latent, AttentionPattern(block=64, blocks=2, recent=64), 16)
    assert cached_token_bytes(sparse, 1, 4, "auto") == 144 * 4 + 144 * 4 // 16
    assert with_pattern(latent, FULL, 16) == latent
