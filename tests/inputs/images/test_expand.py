import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.inputs.images.expand import expand_images
from firstlight.inputs.images.load import PreparedImage
from firstlight.inputs.images.sizes import ImagePlan

PAD = 9


def prepared(count):
    plan = ImagePlan((28 * count, 28), (28 * count, 28), (1, 2, 2 * count), count)
    return PreparedImage(28 * count, 28, plan, f"digest {count}", bytes(count))


@given(
    texts=st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=5), data=st.data()
)
def test_each_placeholder_becomes_as_many_as_its_image_has_tokens(texts, data):
    counts = data.draw(
        st.lists(st.integers(1, 6), min_size=len(texts) - 1, max_size=len(texts) - 1)
    )
    token_ids, positions = list(texts[0]), []
    for text in texts[1:]:
        positions.append(len(token_ids))
        token_ids += [PAD, *text]
    expanded, placed = expand_images(token_ids, positions, [prepared(count) for count in counts])
    assert len(expanded) == len(token_ids) + sum(counts) - len(counts)
    inside = [i for p in placed for i in range(p.first, p.first + p.count)]
    assert [i for i, token in enumerate(expanded) if token == PAD] == inside
    assert [token for token in expanded if token != PAD] == [t for text in texts for t in text]
    assert [(p.count, p.digest, p.grid) for p in placed] == [
        (c, f"digest {c}", (1, 2, 2 * c)) for c in counts
    ]


def test_a_prompt_without_images_stays():
    assert expand_images([1, 2, 3], [], []) == ([1, 2, 3], ())


@pytest.mark.parametrize("positions", [[0], [0, 1, 2], [1, 0], [0, 3], [1, 1]])
def test_placeholders_and_images_must_match(positions):
    with pytest.raises(AssertionError):
        expand_images([PAD, PAD, 1], positions, [prepared(1), prepared(2)])
