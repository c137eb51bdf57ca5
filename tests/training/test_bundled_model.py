"""The bundled k3-mini is what its card says: small, whole, and able to answer what it never saw."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import firstlight
from firstlight.adapt.inspect import inspect_path
from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from firstlight.training.model import Trainable
from firstlight.training.operations import training_kernels
from firstlight.training.predictions import accuracies
from firstlight.training.recipes.k3_mini import held_out
from firstlight.training.recipes.k3_mini.conversations import Conversation, Renderer

BUNDLED = Path(firstlight.__file__).parent / "data" / "k3_mini"


@pytest.fixture(scope="module")
def model() -> Trainable:
    source = open_source(BUNDLED)
    module = assemble(
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=training_kernels(),
        options=BuildOptions(torch.float32, torch.device("cpu"), 0, pack=False),
    ).module
    return Trainable(module, source.spec)


def share(model: Trainable, talks: Iterable[Conversation], count: int) -> float:
    renderer = Renderer(BUNDLED)
    found = accuracies(model, (renderer.example(talk) for talk in islice(talks, count)))
    return sum(right for right, _ in found.values()) / count


def test_it_is_small_whole_and_licensed() -> None:
    report = inspect_path(BUNDLED)
    assert report.sound and report.legal_tp == (1, 2, 4)
    assert report.licence == "apache-2.0"
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 8_000_000


def test_its_tokenizer_and_config_are_those_of_the_recipe(prepared: Any) -> None:
    for made in prepared.folder.iterdir():
        assert made.read_bytes() == (BUNDLED / made.name).read_bytes(), made.name


# Far below the card's shares: a model that was swapped or damaged does not come near.
@pytest.mark.parametrize("thinking", [True, False])
def test_it_answers_what_it_never_saw(model: Trainable, thinking: bool) -> None:
    assert share(model, held_out.digits(thinking=thinking), 60) > 0.85
    assert share(model, held_out.shapes(8, thinking=thinking), 32) > 0.8
    assert share(model, held_out.lists(256, 20, thinking=thinking), 20) > 0.85
    assert share(model, held_out.texts(20, thinking=thinking), 20) > 0.85
