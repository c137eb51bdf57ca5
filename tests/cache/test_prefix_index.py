from struct import pack
from typing import Any, NamedTuple

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.prefix_index import PrefixChain, PrefixIndex, PrefixKey, PrefixScope

SCOPE = PrefixScope("model", 2, "salt")
TOKENS = [1, 2, 3, 4, 5]


class Span(NamedTuple):
    first: int
    count: int
    digest: str


def keys(tokens: list[int], **changes: Any) -> list[PrefixKey]:
    scope = SCOPE._replace(**changes)
    chain = PrefixChain(scope, tokens)
    return [chain.key(i) for i in range(len(tokens) // scope.block_size)]


def test_a_key_is_the_digest_of_parent_and_tokens() -> None:
    root = SCOPE.root()
    first = blake3(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    second = blake3(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()
    assert keys(TOKENS) == [first, second]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_digest": "other"},
        {"salt": ""},
        {"model_digest": "modelsalt", "salt": ""},
        {"block_size": 1},
    ],
)
def test_each_part_of_the_scope_changes_every_key(changes: dict[str, Any]) -> None:
    assert not set(keys(TOKENS)) & set(keys(TOKENS, **changes))


def with_media(*media: Span, length: int = 12) -> list[PrefixKey]:
    """Keys of blocks of 2 tokens that are all the same."""
    chain = PrefixChain(SCOPE, [7] * length, media)
    return [chain.key(i) for i in range(length // 2)]


def num_equal(one: list[PrefixKey], other: list[PrefixKey]) -> int:
    """Blocks that start two prompts alike; behind the first difference none is alike."""
    alike = [a == b for a, b in zip(one, other, strict=True)]
    assert sorted(alike, reverse=True) == alike
    return sum(alike)


@pytest.mark.parametrize(
    ("media", "num_alike"),
    [
        ((), 2),
        ((Span(5, 3, "b"),), 2),
        ((Span(4, 3, "a"),), 2),
        ((Span(5, 2, "a"),), 2),
        ((Span(6, 3, "a"),), 2),
        ((Span(5, 3, "a"), Span(8, 1, "b")), 4),
        ((Span(5, 3, "a"), Span(11, 1, "b")), 5),
        ((Span(0, 1, "b"), Span(5, 3, "a")), 0),
        ((Span(3, 2, "b"), Span(5, 3, "a")), 1),
        ((Span(5, 3, "a"), Span(12, 9, "b")), 6),
    ],
)
def test_a_medium_is_in_the_keys_of_its_blocks_and_of_those_behind(
    media: tuple[Span, ...], num_alike: int
) -> None:
    assert num_equal(with_media(Span(5, 3, "a")), with_media(*media)) == num_alike


def test_a_medium_is_in_the_block_where_it_begins_and_the_order_given_is_no_matter() -> None:
    media = (Span(1, 6, "a"), Span(7, 1, "b"), Span(9, 2, "c"))
    root = SCOPE.root()
    written = {s: pack("<QQQ", s.first, s.count, 1) + s.digest.encode() for s in media}
    a, b, c = (written[span] for span in media)
    for in_block in (a, b"", b"", b, c, b""):
        root = PrefixKey(blake3(root + pack("<II", 7, 7) + in_block).digest())
    assert with_media(*media)[-1] == with_media(*reversed(media))[-1] == root


media_lists = st.lists(
    st.builds(Span, st.integers(0, 11), st.integers(1, 12), st.sampled_from("abc")), max_size=4
)


@given(media_lists, media_lists)
def test_keys_are_alike_exactly_as_far_as_the_media_are(one: list[Span], other: list[Span]) -> None:
    def seen(media: list[Span], stop: int) -> list[list[Span]]:
        blocks = range(0, stop, 2)
        return [sorted(s for s in media if s.first < b + 2 and s[0] + s[1] > b) for b in blocks]

    alike = sum(seen(one, stop) == seen(other, stop) for stop in range(2, 13, 2))
    by_first = (sorted(media) for media in (one, other))
    assert num_equal(*(with_media(*media) for media in by_first)) == alike


def test_equal_blocks_behind_different_ones_have_different_keys() -> None:
    one, other = keys([1, 2, 3, 4]), keys([9, 2, 3, 4])
    assert one[1] != other[1]
    assert keys([1, 2, 1, 2])[0] != keys([1, 2, 1, 2])[1]


def test_keys_follow_a_growing_list_and_refuse_blocks_that_are_not_full() -> None:
    tokens = [1, 2, 3]
    chain = PrefixChain(SCOPE, tokens)
    with pytest.raises(AssertionError):
        chain.key(1)
    tokens += [4]
    assert chain.key(1) == keys([1, 2, 3, 4])[1]


def test_the_first_block_of_a_content_stays_the_one_found() -> None:
    index, (first, second) = PrefixIndex(), keys(TOKENS)
    index.enter(first, 7)
    index.enter(first, 8)
    index.enter(second, 9)
    assert (index.find(first), index.find(second), 8 in index, len(index)) == (7, 9, False, 2)
    index.check_integrity()


def test_a_discarded_block_is_found_no_more() -> None:
    index, (first, second) = PrefixIndex(), keys(TOKENS)
    index.enter(first, 7)
    assert index.discard(7) and not index.discard(7)
    assert index.find(first) is None
    index.enter(second, 7)
    index.check_integrity()
    index._keys[8] = first
    with pytest.raises(AssertionError):
        index.check_integrity()
