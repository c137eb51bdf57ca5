"""Owns which packed tokens of a step are image placeholders and which features stand there.

Knows neither how features are made nor what runs. Shape letters: M placed tokens, D model width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.layers.packed_batch import PlacedFeatures
from firstlight.runner.encoder_cache import EncoderCache, EncodingFailed
from firstlight.runner.rows import RowImage, RowTable
from firstlight.schedule.step import StepPlan

NO_ENCODER = "this model reads no images"


class Placement(NamedTuple):
    """Features [offset, offset + size) of a row's image stand at packed tokens [first, ...)."""

    row: int
    image: RowImage
    first: int
    offset: int
    size: int


def find_placements(plan: StepPlan, table: RowTable) -> list[Placement]:
    """Returns the parts of images that this step computes.

    sequence   ... | image.first ......... image.stop | ...
    this step          | step.start ... step.stop |          packed from `packed` on
    """
    found: list[Placement] = []
    packed = 0
    for step in plan.steps:
        for image in table[step.row].images:
            start = max(image.first, step.start)
            stop = min(image.stop, step.start + step.count)
            if start < stop:
                first = packed + start - step.start
                found.append(Placement(step.row, image, first, start - image.first, stop - start))
        packed += step.count
    return found


class PlacedImages(NamedTuple):
    """The features of a step, None without any, and the reason of each row that has none."""

    features: PlacedFeatures | None
    failed: dict[int, str]


def place_images(
    placements: Sequence[Placement], encoder: EncoderCache | None, device: torch.device
) -> PlacedImages:
    """Fetches or makes the features that are placed, image by image.

    A row whose image has none keeps its placeholders' embeddings and is reported. Rows keep
    features until their image's last token is computed.
    """
    index: list[Tensor] = []
    rows: list[Tensor] = []
    failed: dict[int, str] = {}
    for placement in placements:
        if placement.row in failed:
            continue
        try:
            features_MD = _features(placement.image, encoder)
        except EncodingFailed as problem:
            failed[placement.row] = str(problem)
            continue
        index.append(torch.arange(placement.first, placement.first + placement.size))
        rows.append(features_MD[placement.offset : placement.offset + placement.size])
    if not rows:
        return PlacedImages(None, failed)
    return PlacedImages(PlacedFeatures(torch.cat(index).to(device), torch.cat(rows)), failed)


def _features(image: RowImage, encoder: EncoderCache | None) -> Tensor:
    if image.features_MD is None:
        if encoder is None:
            raise EncodingFailed(NO_ENCODER)
        image.features_MD = encoder.features(image)
    return image.features_MD
