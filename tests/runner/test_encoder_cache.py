"""What features are kept for: found by content, the least recently used going first."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.runner.encoder_cache import EncoderCache, EncodingFailed, ImageEncoder
from firstlight.runner.image_placement import find_placements, place_images
from firstlight.runner.rows import RowImage, RowTable
from firstlight.schedule.request import MediaItem, SamplingParams
from firstlight.schedule.step import NewSequence, SequenceStep, StepPlan

CPU = torch.device("cpu")
WIDTH = 4
TOKEN_BYTES = WIDTH * 4


def brightness(pixels_NCPP, grids):
    """Encodes each patch of one-pixel patches to WIDTH numbers of it."""
    return [pixels_NCPP.flatten(1).mean(1, keepdim=True) * torch.arange(1.0, WIDTH + 1)]


def cache(budget_tokens):
    encoder = ImageEncoder(brightness, CPU, torch.float32)
    return EncoderCache(encoder, budget_bytes=budget_tokens * TOKEN_BYTES)


def image(level, count, first=0):
    return RowImage(first, count, f"{level}-{count}", (1, 1, count), bytes([level]) * 3 * count)


def of_level(level, count):
    return (level / 255 - 0.5) / 0.5 * torch.arange(1.0, WIDTH + 1).expand(count, WIDTH)


@given(
    asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=40),
    budget=st.integers(0, 12),
)
def test_the_least_recently_used_go_first(asked, budget):
    features, kept = cache(budget), OrderedDict()
    encoded = 0
    for level, count in asked:
        key = (level, count)
        encoded += key not in kept
        got = features.features(image(level, count))
        assert torch.allclose(got, of_level(level, count), atol=1e-5)
        if key in kept or count <= budget:
            kept[key] = count
            kept.move_to_end(key)
        while sum(kept.values()) > budget:
            kept.popitem(last=False)
        assert features.used_bytes == sum(kept.values()) * TOKEN_BYTES
        features.check_integrity()
    assert features.num_encoded == encoded
    assert features.num_found == len(asked) - encoded


def test_a_failed_image_leaves_nothing_behind():
    features = cache(8)
    broken = RowImage(0, 2, "x", (1, 1, 2), b"12345")
    with pytest.raises(EncodingFailed, match="do not fit"):
        features.features(broken)
    assert (features.used_bytes, features.num_encoded, features.num_found) == (0, 0, 0)


@given(
    texts=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    counts=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    data=st.data(),
)
def test_every_feature_is_placed_once_at_its_token(texts, counts, data):
    """A sequence of gaps and images is cut into steps at random, beside another sequence."""
    counts = counts[: len(texts) - 1]
    media, length = [], texts[0]
    for index, (count, gap) in enumerate(zip(counts, texts[1:], strict=True)):
        made = image(10 * index, count, first=length)
        media.append(
            MediaItem(
                first=length, count=count, digest=made.digest, grid=made.grid, patches=made.patches
            )
        )
        length += count + gap
    params = SamplingParams(max_tokens=1)
    new = [
        NewSequence(0, "text", [0] * 50, 50, params, []),
        NewSequence(1, "images", [0] * length, length, params, [], tuple(media)),
    ]
    table, features, placed, start = RowTable(2, 0, 1), cache(100), {}, 0
    while start < length:
        count = data.draw(st.integers(1, length - start))
        beside = SequenceStep(0, 0, 3, False, [], [])
        step = SequenceStep(1, start, count, False, [], [])
        plan = StepPlan(1, new if start == 0 else [], [beside, step], [])
        table.apply(plan)
        found = place_images(find_placements(plan, table), features, CPU)
        table.drop_computed_images(plan)
        assert found.failed == {}
        if found.features is not None:
            positions = (found.features.index_M - 3 + start).tolist()
            assert not placed.keys() & set(positions)
            placed.update(zip(positions, found.features.rows_MD, strict=True))
        start += count
    wanted = {
        item.first + i: of_level(10 * index, 1)[0]
        for index, item in enumerate(media)
        for i in range(item.count)
    }
    assert placed.keys() == wanted.keys()
    assert all(torch.allclose(placed[p], wanted[p], atol=1e-5) for p in wanted)
    assert table[1].images == [] and features.num_encoded == len({m.digest for m in media})
