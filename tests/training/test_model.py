"""A model in training equals the one that serves: cut over ranks, and many pictures at once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from firstlight.training.examples import Example, Picture, make_batch
from firstlight.training.loop import sequence_outcome
from firstlight.training.model import build_trainable, pixels
from firstlight.training.operations import training_kernels
from firstlight.training.vision_batch import encode
from tiny_training import tiny_config

EXAMPLES = [
    Example("one", tuple(range(20, 37)), (False,) * 9 + (True,) * 8),
    Example("two", (5, 6, 7, 5, 6, 7), (False, False, True, True, True, True)),
]


def losses(tp: int, rank: int) -> list[float]:
    """Two losses with a step of plain descent between them."""
    mesh = Mesh(Layout(tp=tp).place(rank), dist.group.WORLD if tp > 1 else None)
    model = build_trainable(tiny_config(), training_kernels(), 7, mesh=mesh)
    found = []
    for _ in range(2):
        loss = sequence_outcome(model, EXAMPLES).loss
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            for parameter in model.module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad
                    parameter.grad = None
    return found


def on_rank(tp: int) -> list[float]:
    return losses(tp, dist.get_rank())


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_learn_what_one_rank_learns(ranks: Any, tp: int) -> None:
    want = losses(1, 0)
    assert want[1] < want[0]
    for found in ranks(tp).run(on_rank, tp):
        assert found == pytest.approx(want, rel=1e-5)


def drawn(grid: tuple[int, int, int], seed: int) -> Picture:
    size = (grid[1] * grid[2], 3, 14, 14)
    levels = torch.randint(256, size, generator=torch.Generator().manual_seed(seed))
    return Picture(0, grid, levels.byte().numpy().tobytes())


@pytest.mark.parametrize("grids", [[(1, 4, 4)] * 3, [(1, 8, 8)] * 2, [(1, 4, 4), (1, 2, 6)]])
def test_pictures_at_once_are_the_pictures_one_by_one(grids: list[tuple[int, int, int]]) -> None:
    model = build_trainable(tiny_config(), training_kernels(), 7)
    shown = [drawn(grid, seed) for seed, grid in enumerate(grids)]
    with torch.no_grad():
        together = encode(model.module, pixels(shown, model.spec), grids)
        alone = [model.module.encode(pixels([p], model.spec), [p.grid])[0] for p in shown]
    for found, want in zip(together, alone, strict=True):
        assert torch.allclose(found, want, atol=1e-5)


def test_a_batch_places_what_counts_and_pictures() -> None:
    shown = Example("seen", (1, 2, 3, 4), (False, False, False, True), (drawn((1, 2, 2), 1),))
    batch = make_batch([EXAMPLES[1], shown])
    assert batch.packed.bounds == (0, 6, 10) and batch.pictures[0].first == 6
    assert batch.places_M.tolist() == [1, 2, 3, 4, 8]
    assert batch.targets_M.tolist() == [7, 5, 6, 7, 4]
    assert batch.owner_M.tolist() == [0, 0, 0, 0, 1] and batch.tasks == ("two", "seen")
