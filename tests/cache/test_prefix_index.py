from typing import Any

import pytest
from blake3 import blake3

from firstlight.cache.prefix_index import PrefixChain, PrefixIndex, PrefixKey, PrefixScope

SCOPE = PrefixScope("model", 2, "salt", ("image",))
TOKENS = [1, 2, 3, 4, 5]


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
        {"media_digests": ()},
        {"media_digests": ("image", "image")},
        {"media_digests": ("im", "age")},
        {"salt": "saltimage", "media_digests": ()},
        {"block_size": 1},
    ],
)
def test_each_part_of_the_scope_changes_every_key(changes: dict[str, Any]) -> None:
    assert not set(keys(TOKENS)) & set(keys(TOKENS, **changes))


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
