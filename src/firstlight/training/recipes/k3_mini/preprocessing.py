"""Owns turning a picture into what a training example carries, by the service's preprocessing.

It knows no question.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from firstlight.inputs.images.pixels import image_patches
from firstlight.inputs.images.preprocess_settings import (
    PreprocessSettings,
    read_preprocess_settings,
)
from firstlight.inputs.images.sizes import plan_image
from firstlight.training.examples import Picture


def settings_of(folder: Path) -> PreprocessSettings:
    """Reads the settings that stand beside the tokenizer."""
    settings = read_preprocess_settings(folder)
    assert settings is not None, f"{folder} holds no preprocessor_config.json"
    return settings


def as_picture(image: Image.Image, settings: PreprocessSettings) -> tuple[Picture, int]:
    """Returns the patches of an image, and the tokens it takes."""
    plan = plan_image(*image.size, settings)
    return Picture(0, plan.grid, image_patches(image, plan, settings)), plan.num_tokens
