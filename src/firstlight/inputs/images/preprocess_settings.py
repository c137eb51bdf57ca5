"""Owns reading a checkpoint's preprocessor_config.json into what image preprocessing needs.
It knows nothing of pixels; every field is used or refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError
from firstlight.inputs.json_object import read_object
from firstlight.models.config_reader import ConfigReader

FILE_NAME = "preprocessor_config.json"
_SECTION = "media_proc_cfg"
# Names of Python classes, which say nothing about the pixels.
_CLASS_FIELDS = ("auto_map", "processor_class", "image_processor_type", "feature_extractor_type")
# Video is not served; the last one names the class these fields were once made for.
_OTHER_MEDIA = (
    "in_patch_limit_each_frame", "in_patch_limit_video", "sample_fps", "max_num_frames_each_video",
    "temporal_merge_kernel_size", "timestamp_mode", "config_type",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chessboard:
    """The background behind transparent pixels: squares of `square` pixels in two levels.

    `first` is the level of the top left square, `second` that of its neighbours, 0 to 255.
    """

    square: int
    first: int
    second: int


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """How a picture becomes patches: `patch_size` pixels a side, `merge_size` patches a token side.

    `max_patches` limits the patches of the picture before padding, `max_side_patches` those along
    one side.
    """

    patch_size: int
    merge_size: int
    max_patches: int
    max_side_patches: int
    background: Chessboard

    @property
    def token_pixels(self) -> int:
        """Pixels along a side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def max_side_pixels(self) -> int:
        """Pixels a side may have at most once it is shrunk."""
        return self.max_side_patches * self.patch_size


def read_preprocess_settings(directory: Path) -> PreprocessSettings | None:
    """Reads preprocessor_config.json in `directory`; None when there is none.

    Raises ConfigError naming every field that is missing, unknown or asks for other pixels than
    those computed here.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    outer = ConfigReader(read_object(path), str(path))
    outer.ignore(_CLASS_FIELDS)
    section = outer.take(_SECTION, dict)
    outer.finish()
    return _read_section(section, f"{path}: {_SECTION}")


def _read_section(fields: Mapping[str, Any], where: str) -> PreprocessSettings:
    reader = ConfigReader(fields, where)
    reader.ignore(_OTHER_MEDIA)
    # The model turns levels into numbers with these; other values would need another table there.
    reader.must_equal("image_mean", [[0.5, 0.5, 0.5]], None)
    reader.must_equal("image_std", [[0.5, 0.5, 0.5]], None)
    reader.must_equal("fixed_output_tokens", [None], None)
    reader.must_equal("transparent_bg_fill_stage", ["after_resize"], None)
    settings = PreprocessSettings(
        patch_size=reader.positive("patch_size"),
        merge_size=reader.positive("merge_kernel_size"),
        max_patches=reader.positive("in_patch_limit"),
        max_side_patches=reader.positive("patch_limit_on_one_side"),
        background=_read_background(reader.take("transparent_bg_config", dict), where),
    )
    reader.finish()
    if settings.max_side_patches % settings.merge_size:
        raise ConfigError(
            f"{where}: patch_limit_on_one_side {settings.max_side_patches} is no multiple of "
            f"merge_kernel_size {settings.merge_size}, so padding would exceed it"
        )
    return settings


def _read_background(fields: Mapping[str, Any], where: str) -> Chessboard:
    reader = ConfigReader(fields, f"{where}.transparent_bg_config")
    reader.must_equal("pattern", ["chessboard"], None)
    white, gray = (reader.take(f"chessboard_{name}_value", int) for name in ("white", "gray"))
    if not (0 <= white <= 255 and 0 <= gray <= 255):
        raise ConfigError(f"{where}.transparent_bg_config: levels must be from 0 to 255")
    starts_white = reader.take("chessboard_square_on_top_left", bool)
    square = reader.positive("chessboard_square_size")
    reader.finish()
    first, second = (white, gray) if starts_white else (gray, white)
    return Chessboard(square=square, first=first, second=second)
