import json

import pytest

from firstlight.errors import ConfigError
from firstlight.inputs.images.preprocess_settings import read_preprocess_settings


@pytest.fixture
def written(k3_data, tmp_path):
    """Writes the miniature's file with changed fields and reads it."""

    def read(changes=None, **outer):
        fields = json.loads((k3_data / "checkpoint" / "preprocessor_config.json").read_text())
        fields["media_proc_cfg"].update(changes or {})
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, **outer}))
        return read_preprocess_settings(tmp_path)

    return read


def test_every_field_that_counts_is_read(written):
    settings = written({"in_patch_limit": 65536, "patch_limit_on_one_side": 512})
    assert (settings.max_patches, settings.max_side_patches) == (65536, 512)
    assert (settings.token_pixels, settings.max_side_pixels) == (28, 7168)
    assert (settings.background.square, settings.background.first) == (8, 255)
    assert settings.background.second == 180


def test_a_model_without_the_file_takes_no_images(tmp_path):
    assert read_preprocess_settings(tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fixed_output_tokens", 64),
        ("image_mean", [0.48, 0.46, 0.41]),
        ("image_std", [0.3, 0.3, 0.3]),
        ("transparent_bg_fill_stage", "before_resize"),
        ("transparent_bg_config", {"pattern": "white"}),
        ("transparent_bg_config", None),
        ("patch_size", 0),
        ("merge_kernel_size", [2, 2]),
        ("in_patch_limit", "many"),
        ("patch_limit_on_one_side", 21),
        ("a_new_field", 1),
    ],
)
def test_what_would_give_other_pixels_is_refused_by_name(written, field, value):
    with pytest.raises(ConfigError, match=field):
        written({field: value})


def test_fields_beside_the_section_are_refused_unless_they_name_classes(written):
    assert written(auto_map={"AutoProcessor": "x"}, processor_class="X") is not None
    with pytest.raises(ConfigError, match="do_rescale"):
        written(do_rescale=True)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read|not an object"):
        read_preprocess_settings(tmp_path)


def test_the_first_square_may_be_gray(written, mini):
    board = {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": False,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    }
    settings = written({"transparent_bg_config": board})
    assert (settings.background.first, settings.background.second) == (180, 255)
