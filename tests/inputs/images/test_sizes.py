"""The size rule against the tables of the reference, and what must hold for any picture."""

import json
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.inputs.images.preprocess_settings import Chessboard, PreprocessSettings
from firstlight.inputs.images.sizes import plan_image

BOARD = Chessboard(square=8, first=255, second=180)
SIDES = st.one_of(st.integers(1, 64), st.integers(1, 9000), st.integers(1, 10**7))


def made(max_patches, max_side_patches):
    return PreprocessSettings(
        patch_size=14,
        merge_size=2,
        max_patches=max_patches,
        max_side_patches=max_side_patches,
        background=BOARD,
    )


LIMITS = st.builds(made, st.integers(1, 70000), st.integers(1, 300).map(lambda n: 2 * n))


@pytest.mark.parametrize("table", ["real_config", "mini_config"])
def test_sizes_are_those_of_the_table(table, k3_data, real, mini):
    limits = {"real_config": real, "mini_config": mini}[table]
    rows = json.loads((k3_data / "preprocess" / "sizes.json").read_text())[table]
    assert len(rows) > 10
    for row in rows:
        plan = plan_image(row["w"], row["h"], limits)
        assert plan == (
            tuple(row["resized"]),
            tuple(row["padded"]),
            tuple(row["grid_thw"]),
            row["tokens"],
        ), row


@settings(max_examples=2000, deadline=None)
@given(width=SIDES, height=SIDES, limits=LIMITS)
def test_every_picture_keeps_the_limits(width, height, limits):
    plan = plan_image(width, height, limits)
    frames, rows, columns = plan.grid
    assert frames == 1 and plan.padded == (columns * 14, rows * 14)
    assert plan.num_tokens == prod(plan.grid) // 4 and rows % 2 == columns % 2 == 0
    for before, resized, padded in zip((width, height), plan.resized, plan.padded, strict=True):
        assert 1 <= resized <= before
        assert 0 <= padded - resized < 28
        assert padded <= limits.max_side_pixels
    # Whole patches times the share of area that is left, the area of the lost parts included.
    whole = max(1, width // 14) * max(1, height // 14)
    left = prod(plan.resized) / (width * height)
    thin = 1 in plan.resized  # a side of one pixel cannot shrink further
    assert thin or whole * left <= limits.max_patches * (1 + 1e-9)


@settings(max_examples=500, deadline=None)
@given(width=st.integers(1, 3584), height=st.integers(1, 3584))
def test_a_picture_within_the_limits_is_not_resized(width, height):
    assert plan_image(width, height, made(65536, 512)).resized == (width, height)


@settings(max_examples=500, deadline=None)
@given(width=SIDES, height=SIDES, limits=LIMITS)
def test_a_turned_picture_has_the_turned_plan(width, height, limits):
    plan, turned = plan_image(width, height, limits), plan_image(height, width, limits)
    assert plan.resized == turned.resized[::-1] and plan.padded == turned.padded[::-1]
    assert plan.num_tokens == turned.num_tokens
