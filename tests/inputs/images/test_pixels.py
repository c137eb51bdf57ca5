"""Patches against those of the reference, byte for byte, and what transparency does."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from firstlight.inputs.images.decode import decode_image, open_image
from firstlight.inputs.images.pixels import image_patches
from firstlight.inputs.images.policy import ImagePolicy
from firstlight.inputs.images.sizes import plan_image

CASES = ("image_two", "image_alpha_dot", "image_fit")


def tensors(path, *names):
    with safe_open(path, "np") as file:
        return [file.get_tensor(name) for name in names]


def patches_of(path, limits):
    image = open_image(path.read_bytes(), ImagePolicy(), "image")
    plan = plan_image(*image.size, limits)
    data = image_patches(decode_image(image, "image"), plan, limits)
    return plan, np.frombuffer(data, np.uint8).reshape(-1, 3, 14, 14)


def patches_of_image(image, limits):
    plan = plan_image(*image.size, limits)
    return np.frombuffer(image_patches(image, plan, limits), np.uint8).reshape(-1, 3, 14, 14)


def test_other_modes_give_the_expected_patches(k3_data, mini):
    folder = k3_data / "preprocess"
    table = json.loads((folder / "pixels.json").read_text())
    changed = table["media_proc_cfg_overrides"]
    limits = dataclasses.replace(
        mini,
        max_patches=changed["in_patch_limit"],
        max_side_patches=changed["patch_limit_on_one_side"],
    )
    assert len(table["images"]) == 8
    for row in table["images"]:
        plan, got = patches_of(folder / row["file"], limits)
        assert plan.grid == tuple(row["grid_thw"]), row
        assert plan.resized == tuple(row["resized"]) and plan.padded == tuple(row["padded"])
        name = row["file"].removesuffix(".png")
        (want,) = tensors(folder / "pixels.safetensors", name)
        assert np.array_equal(got, want), row


@pytest.mark.parametrize("case", CASES)
def test_the_pictures_of_the_cases_give_the_expected_patches(case, k3_data, mini):
    folder = k3_data / "cases"
    rows = json.loads((folder / f"{case}.json").read_text())["images"]
    for index, row in enumerate(rows):
        names = [f"image.{index}.grid_thw", f"image.{index}.patches_u8"]
        grid, want = tensors(folder / f"{case}.safetensors", *names)
        plan, got = patches_of(folder / "images" / row["file"].split("/")[-1], mini)
        assert plan.grid == tuple(grid.tolist())
        assert plan.num_tokens == row["tokens"]
        assert np.array_equal(got, want)


def test_patches_run_row_by_row_and_the_padding_is_black(mini):
    columns, rows = np.meshgrid(np.arange(40), np.arange(30))
    pixels = np.stack([rows, columns, np.full_like(rows, 7)], -1).astype(np.uint8)
    got = patches_of_image(Image.fromarray(pixels), mini)
    assert got.shape == (16, 3, 14, 14)
    for index, patch in enumerate(got):
        top, left = index // 4 * 14, index % 4 * 14
        want = np.zeros((3, 14, 14), np.uint8)
        part = pixels[top : top + 14, left : left + 14].transpose(2, 0, 1)
        want[:, : part.shape[1], : part.shape[2]] = part
        assert np.array_equal(patch, want)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_wholly_transparent_picture_is_the_chessboard(mode, mini):
    got = patches_of_image(Image.new(mode, (28, 28), 0), mini)
    assert got[0, 0, 0].tolist() == [255] * 8 + [180] * 6
    assert got[0, 2, 8].tolist() == [180] * 8 + [255] * 6
    assert got[1, 1, 0].tolist() == [180] * 2 + [255] * 8 + [180] * 4


def test_alpha_mixes_and_truncates(mini):
    got = patches_of_image(Image.new("RGBA", (28, 28), (10, 20, 30, 100)), mini)
    share = np.float32(100) / np.float32(255)
    want = [int(share * np.float32(c) + (1 - share) * np.float32(255)) for c in (10, 20, 30)]
    assert got[0, :, 0, 0].tolist() == want


def test_one_transparent_colour_counts_in_gray_and_not_in_rgb(mini):
    gray = Image.new("L", (28, 28), 5)
    gray.info["transparency"] = 5
    assert patches_of_image(gray, mini)[0, 0, 0, 0] == 255
    coloured = Image.new("RGB", (28, 28), (5, 6, 7))
    coloured.info["transparency"] = (5, 6, 7)
    assert patches_of_image(coloured, mini)[0, :, 0, 0].tolist() == [5, 6, 7]
