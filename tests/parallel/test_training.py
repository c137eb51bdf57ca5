"""Training on several ranks: every gradient is the one that a single rank computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.packed_batch import pack_whole
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import slice_for
from tiny_models import tiny_config, write_checkpoint

LENGTHS = (9, 33)
# Gradients are sums over tokens and ranks in another order; relative to the largest of a tensor.
TOLERANCE = 2e-5
CPU = torch.device("cpu")


def batch_ids() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 300, (2, sum(LENGTHS)), generator=generator)
    return ids[0], ids[1]


def build(folder: Path, tp: int, rank: int) -> Any:
    source = open_source(folder)
    return assemble(
        source.spec,
        source.weights,
        mesh=Mesh(Layout(tp=tp).place(rank), dist.group.WORLD if tp > 1 else None),
        kernels=reference_kernels(),
        options=BuildOptions(torch.float32, CPU, 64, trainable=True),
    ).module


def loss_and_gradients(
    folder: Path, tp: int, rank: int = 0
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Returns the loss, the gradients, and the parameters after one step of plain descent."""
    module = build(folder, tp, rank)
    tokens_T, targets_T = batch_ids()
    logits_TV = module.head(module(tokens_T, pack_whole(LENGTHS)))
    loss = torch.nn.functional.cross_entropy(logits_TV, targets_T)
    loss.backward()
    named = dict(module.named_parameters())
    gradients = {name: p.grad.clone() for name, p in named.items()}
    after = {name: (p - 0.1 * p.grad).detach() for name, p in named.items()}
    return loss.item(), gradients, after


def on_rank(folder: Path, tp: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    return loss_and_gradients(folder, tp, dist.get_rank())


# Those that differ in what is cut, shared, tied, held once or normalised inside a region.
FAMILIES = ("llama3", "llama-biased", "smollm2", "qwen2", "qwen3", "smollm3")


@pytest.fixture(params=FAMILIES)
def checkpoint(request: Any, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config(request.param))
    return tmp_path


def expected_part(whole: Tensor, part: Any) -> Tensor:
    """What a rank should hold: its run of the whole, zeros where it holds padding or nothing."""
    if part.zero:
        return torch.zeros_like(whole)
    own = whole.narrow(part.dim, part.start, part.stop - part.start)
    if not part.padded:
        return own
    shape = list(own.shape)
    shape[part.dim] = part.padded
    return torch.cat([own, torch.zeros(shape)], part.dim)


@pytest.mark.parametrize("tp", [2, 4])
def test_gradients_equal_those_of_one_rank(checkpoint: Path, ranks: Any, tp: int) -> None:
    spec = open_source(checkpoint).spec
    loss, whole, _ = loss_and_gradients(checkpoint, 1)
    for rank, (rank_loss, gradients, _) in enumerate(ranks(tp).run(on_rank, checkpoint, tp)):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert set(gradients) == set(whole)
        for rule in spec.tensors:
            part = slice_for(rule, spec.facts, Layout(tp=tp).place(rank))
            want, largest = expected_part(whole[rule.name], part), whole[rule.name].abs().max()
            error = (gradients[rule.name] - want).abs().max()
            assert largest > 0 and error <= TOLERANCE * largest, f"rank {rank}: {rule.name}"


def test_ranks_that_hold_the_same_stay_the_same(tmp_path: Path, ranks: Any) -> None:
    """After a step of descent shared KV heads and replicated tensors are equal to the last bit."""
    config = tiny_config("qwen3", num_key_value_heads=2)
    spec = write_checkpoint(tmp_path, config)
    after = [found[2] for found in ranks(4).run(on_rank, tmp_path, 4)]
    for rule in spec.tensors:
        parts = [slice_for(rule, spec.facts, Layout(tp=4).place(rank)) for rank in range(4)]
        for rank, part in enumerate(parts):
            first = parts.index(part)
            assert torch.equal(after[rank][rule.name], after[first][rule.name]), rule.name


def test_a_model_to_serve_has_no_gradients(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    source = open_source(tmp_path)
    module = assemble(
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=reference_kernels(),
        options=BuildOptions(torch.float32, CPU, 64),
    ).module
    assert not any(p.requires_grad for p in module.parameters()) and not module.training
