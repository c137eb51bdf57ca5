"""Images through scheduler, cache and runner, over the miniature and its expected answers."""

import json
from copy import copy
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replaced
from safetensors import safe_open

from firstlight.layers.pixel_levels import normalise_pixels, pixel_table
from firstlight.runner.rows import RowImage
from firstlight.schedule.request import MediaItem
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy
from tiny_kimi import K3_DATA, MINIATURE
from tiny_models import tiny_config, write_checkpoint

CASES = ("image_two", "image_alpha_dot", "image_fit")
SHAPE = EngineShape(num_slots=24)


class Case:
    """A prompt with its images, and the tokens that continue it."""

    def __init__(self, name):
        fields = json.loads((K3_DATA / "cases" / f"{name}.json").read_text())
        self.ids, self.greedy = fields["input_ids"], fields["greedy_token_ids"]
        pad = json.loads((MINIATURE / "config.json").read_text())["media_placeholder_token_id"]
        pads = [i for i, token in enumerate(self.ids) if token == pad]
        self.tensors = safe_open(K3_DATA / "cases" / f"{name}.safetensors", "pt")
        self.media = []
        for index, image in enumerate(fields["images"]):
            patches = self.tensors.get_tensor(f"image.{index}.patches_u8")
            grid = tuple(self.tensors.get_tensor(f"image.{index}.grid_thw").tolist())
            first = pads[sum(item.count for item in self.media)]
            item = MediaItem(
                first=first,
                count=image["tokens"],
                digest=f"{name} {index}",
                grid=grid,
                patches=patches.numpy().tobytes(),
            )
            self.media.append(item)
        assert sum(item.count for item in self.media) == len(pads) > 0

    def features(self, index):
        return self.tensors.get_tensor(f"image.{index}.features")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def two():
    return Case("image_two")


def run(engine, *cases, max_tokens=24):
    ids = [engine.submit(c.ids, greedy(max_tokens), c.media) for c in cases]
    while engine.step():
        pass
    engine.scheduler.check_integrity()
    engine.images.check_integrity()
    return [engine.outcomes[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def model():
    return LocalEngine(MINIATURE, SHAPE, fast_kernels()).model


@pytest.fixture
def engine_with(model):
    """Makes engines over one loaded model."""
    return lambda **changes: LocalEngine(MINIATURE, replace(SHAPE, **changes), None, model)


def test_levels_become_the_numbers_of_the_reference():
    tensors = Case("image_two").tensors
    table_3V = tensors.get_tensor("pixel_norm_lut")
    assert all(torch.equal(pixel_table(), row) for row in table_3V)
    levels = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    for dtype in (torch.float32, torch.bfloat16):
        got = normalise_pixels(levels, dtype)
        assert got.shape == levels.shape and torch.equal(got.flatten(), pixel_table().to(dtype))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_every_chunk_size_gives_the_expected_tokens(case, chunk, engine_with):
    engine = engine_with(chunk_tokens=chunk)
    (outcome,) = run(engine, case)
    assert outcome.error is None and outcome.token_ids == case.greedy
    assert engine.images.num_encoded == len(case.media)
    assert engine.images.num_found == 0  # the row keeps what it was given


def test_features_are_those_expected(case, engine_with):
    engine = engine_with()
    run(engine, case, max_tokens=1)
    for index, item in enumerate(case.media):
        got = engine.images.features(row_image(item))
        assert (got - case.features(index)).abs().max() < 1e-4
    assert engine.images.num_found == engine.images.num_encoded == len(case.media)


def test_a_prefix_that_covers_the_images_encodes_nothing(case, engine_with):
    """Even without any cache of features: what the prefix cache holds is not computed again."""
    engine = engine_with(encoder_cache_bytes=0)
    run(engine, case, max_tokens=1)
    encoded = engine.images.num_encoded
    (again,) = run(engine, case, max_tokens=4)
    assert again.token_ids == case.greedy[:4]
    last = max(item.first + item.count for item in case.media)
    uncovered = [m for m in case.media if m.first + m.count > again.num_cached]
    assert again.num_cached > 0 and (not uncovered or last > again.num_cached)
    assert engine.images.num_encoded - encoded == len(uncovered)


def test_the_same_images_behind_another_text_are_found_by_content(case, engine_with):
    engine = engine_with()
    (want,) = run(engine_with(), shifted(case, 3), max_tokens=6)
    run(engine, case, max_tokens=1)
    encoded = engine.images.num_encoded
    (moved,) = run(engine, shifted(case, 3), max_tokens=6)
    assert moved.num_cached == 0 and moved.token_ids == want.token_ids
    assert engine.images.num_encoded == encoded
    assert engine.images.num_found == len(case.media)


def test_other_pictures_behind_the_same_tokens_share_nothing(two, engine_with):
    """Token ids are equal; only what stands behind the placeholders differs."""
    engine = engine_with()
    run(engine, two, max_tokens=1)
    other = changed(two, patches=bytes(255 - level for level in two.media[0].patches))
    (outcome,) = run(engine, other, max_tokens=8)
    (want,) = run(engine_with(), other, max_tokens=8)
    assert outcome.num_cached <= two.media[0].first
    assert outcome.token_ids == want.token_ids != two.greedy[:8]


def test_requests_with_images_and_without_run_together(engine_with):
    cases = [Case(name) for name in CASES]
    engine = engine_with(max_batch_tokens=32, chunk_tokens=13)
    text = json.loads((K3_DATA / "cases" / "text_64.json").read_text())
    plain = engine.submit(text["input_ids"], greedy(24))
    outcomes = run(engine, *cases)
    assert [outcome.token_ids for outcome in outcomes] == [case.greedy for case in cases]
    assert engine.outcomes[plain].token_ids == text["greedy_token_ids"]


def test_a_row_keeps_features_that_the_cache_lets_go(two, engine_with):
    """The budget holds one image: while the second is encoded the first is still being read."""
    one = max(item.count for item in two.media) * two.features(0).shape[1] * 4
    engine = engine_with(encoder_cache_bytes=one, chunk_tokens=7, max_batch_tokens=16)
    outcomes = run(engine, two, Case("image_fit"))
    assert outcomes[0].token_ids == two.greedy
    assert engine.images.num_encoded == 3
    assert 0 < engine.images.used_bytes <= one


def test_preempted_requests_are_computed_again(two, engine_with):
    squeezed = engine_with(num_blocks=32, block_size=8, chunk_tokens=16, num_slots=8)
    pair = (two, shifted(two, 1))
    wants = [run(engine_with(), case)[0].token_ids for case in pair]
    outcomes = run(squeezed, *pair)
    assert [outcome.token_ids for outcome in outcomes] == wants
    assert squeezed.scheduler.counts.preemptions > 0


def test_rows_drop_pixels_and_features_once_they_are_computed(two, engine_with):
    engine = engine_with(chunk_tokens=4)
    engine.submit(two.ids, greedy(2), two.media)
    left = []
    while engine.step():
        images = engine.table[0].images
        left.append([image.first for image in images])
        held = [image for image in images if image.features_MD is not None]
        assert len(held) <= 1  # nothing is encoded before a step needs it
    assert left[0] == [item.first for item in two.media] and left[-1] == []
    assert sorted(left, reverse=True, key=len) == left


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patches": b"abc"}, "do not fit a grid"),
        ({"grid": (1, 2, 2)}, "do not fit a grid"),
        ({"patches": b""}, "do not fit a grid"),
        ({"grid": (0, 0, 0), "patches": b""}, "do not fit a grid"),
        ({"grid": (1, 1, 4), "patches": bytes(4 * 588)}, "the image encoder failed"),
        ({"grid": (1, 2, 2), "patches": bytes(4 * 588)}, "1 features for"),
    ],
)
def test_an_image_that_cannot_be_encoded_fails_its_request_alone(two, changes, reason, engine_with):
    engine = engine_with()
    good, bad = run(engine, shifted(two, 2), changed(two, **changes), max_tokens=3)
    assert bad.finish == "error" and reason in bad.error and bad.token_ids == []
    assert good.error is None and len(good.token_ids) == 3
    (after,) = run(engine, two, max_tokens=3)
    assert after.token_ids == two.greedy[:3]


def test_features_that_are_not_finite_fail_their_request_alone(two, engine_with):
    engine = engine_with()
    (text,) = run_text(engine)
    weight = engine.model.projector.norm.weight
    kept = weight[0].item()
    weight.data[0] = float("nan")
    (bad,) = run(engine, two, max_tokens=4)
    weight.data[0] = kept
    assert bad.finish == "error" and "not finite" in bad.error
    assert engine.images.used_bytes == 0 and run_text(engine)[0].token_ids == text.token_ids
    (after,) = run(engine, two, max_tokens=4)
    assert after.token_ids == two.greedy[:4] and after.num_cached == 0


def test_a_model_that_reads_no_images_fails_a_request_that_has_one(two, tmp_path):
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    engine = LocalEngine(tmp_path)
    request = engine.submit([i % 300 for i in two.ids], greedy(2), two.media)
    while engine.step():
        pass
    assert engine.images is None
    assert engine.outcomes[request].error == "this model reads no images"


def run_text(engine):
    return engine.run([[5, 6, 7, 8]], greedy(4))


def row_image(item):
    return RowImage(item.first, item.count, item.digest, item.grid, item.patches)


def shifted(case, by):
    """The case behind `by` more tokens."""
    moved = copy(case)
    moved.ids = [*range(20, 20 + by), *case.ids]
    moved.media = [replaced(item, first=item.first + by) for item in case.media]
    return moved


def changed(case, **changes):
    """The case with another first image."""
    other = copy(case)
    item = replaced(case.media[0], digest=f"changed {sorted(changes)}", **changes)
    other.media = [item, *case.media[1:]]
    return other
