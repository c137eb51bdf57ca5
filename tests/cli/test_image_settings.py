"""What `serve` is told about images reaches the loader, or is refused by name."""

import base64
from pathlib import Path

import pytest

from firstlight.cli.launch import make_image_loader
from firstlight.errors import ConfigError, RequestError, UsageError
from firstlight.inputs.images.load import ImagePart
from firstlight.runner.model_path import read_spec
from firstlight.settings.serve import ServeSettings

K3 = Path(__file__).parents[1] / "data" / "k3"
CHECKPOINT = K3 / "checkpoint"


def loader(folder=CHECKPOINT, **changes):
    settings = ServeSettings(model=CHECKPOINT, **changes)
    return make_image_loader(settings, read_spec(CHECKPOINT), folder)


def picture(name):
    data = base64.b64encode((K3 / "cases" / "images" / name).read_bytes()).decode()
    return ImagePart(f"data:image/png;base64,{data}", "here")


async def test_images_are_planned_as_the_model_says():
    one = loader()
    (image,) = await one.load([picture("fit.png")])
    assert (image.plan.grid, image.plan.num_tokens) == ((1, 12, 10), 30)
    one.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"images_per_request": 0}, "too_many_images"),
        ({"image_max_bytes": 100}, "image_too_large"),
        ({"image_max_pixels": 100}, "image_too_large"),
        ({"context": 29}, "context_length_exceeded"),
    ],
)
async def test_each_limit_is_that_of_the_settings(changes, code):
    one = loader(**changes)
    with pytest.raises(RequestError) as caught:
        await one.load([picture("fit.png")])
    assert caught.value.code == code
    one.close()


async def test_hosts_of_the_settings_are_the_only_ones_asked():
    one = loader(image_fetch_hosts="a.example, b.example")
    with pytest.raises(RequestError, match="not among the hosts"):
        await one.load([ImagePart("http://c.example/x.png", "here")])
    one.close()
    with pytest.raises(UsageError, match="http://a"):
        loader(image_fetch_hosts="http://a")


def test_a_model_that_does_not_say_how_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        loader(tmp_path)
