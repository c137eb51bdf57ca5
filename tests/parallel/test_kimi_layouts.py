"""Kimi K3 cut by heads, by expert width and by expert: every layout gives what one rank gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from firstlight.assembly.source import open_source
from firstlight.errors import LayoutError
from firstlight.layers.packed_batch import PlacedFeatures, pack_whole
from firstlight.models.spec import ModelSpec
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import check_layout, slice_for
from k3_layouts import write_layout_miniature
from k3_oracle import CHECKPOINT, cached_batch, load_model, make_states

LENGTHS = (9, 33)
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
# fp32 logits (of standard deviation 1) lie up to 5.7e-5 from float64 ones at one rank: two such.
LOGITS = 1.2e-4
# In float64, of the largest of each tensor: parameters kept in F32 round their gradient (6e-8).
# In fp32 one rank alone is up to 8.5e-5 away from float64.
GRADIENTS = 2e-7
GRADIENTS_FP32 = 1.7e-4


def batch_ids() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 640, (2, sum(LENGTHS)), generator=generator)
    return ids[0], ids[1]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: Any) -> tuple[Path, ModelSpec]:
    folder = tmp_path_factory.mktemp("k3")
    return folder, write_layout_miniature(folder)


@torch.inference_mode()
def logits_of(folder: Path, layout: Layout, rank: int = 0) -> Tensor:
    module = load_model(folder, layout=layout, rank=rank, group=_group(layout))
    logits: Tensor = module.head(module(batch_ids()[0], pack_whole(LENGTHS)))
    return logits


@torch.inference_mode()
def decoded(folder: Path, spec: ModelSpec, layout: Layout, rank: int = 0) -> Tensor:
    """Logits of the second sequence: a chunk of 20 and then one token at a time, from the cache."""
    module = load_model(folder, layout=layout, rank=rank, group=_group(layout))
    ids = batch_ids()[0][LENGTHS[0] :]
    states, rows = make_states(spec, len(ids), tp=layout.tp), []
    for start, stop in [(0, 20), *((i, i + 1) for i in range(20, len(ids)))]:
        rows.append(module.head(module(ids[start:stop], cached_batch(start, stop), states)))
    return torch.cat(rows)


def gradients_of(
    folder: Path, layout: Layout, dtype: torch.dtype = torch.float64, rank: int = 0
) -> tuple[float, dict[str, Tensor]]:
    group = _group(layout)
    module = load_model(folder, dtype=dtype, layout=layout, rank=rank, group=group, trainable=True)
    tokens_T, targets_T = batch_ids()
    logits_TV = module.head(module(tokens_T, pack_whole(LENGTHS)))
    loss = torch.nn.functional.cross_entropy(logits_TV, targets_T)
    loss.backward()
    named = module.named_parameters()
    return loss.item(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def _group(layout: Layout) -> Any:
    return dist.group.WORLD if layout.tp > 1 else None


def logits_on_rank(folder: Path, layout: Layout) -> Tensor | None:
    logits = logits_of(folder, layout, dist.get_rank())
    return logits.clone() if dist.get_rank() == 0 else None


def decoded_on_rank(folder: Path, spec: ModelSpec, layout: Layout) -> Tensor | None:
    logits = decoded(folder, spec, layout, dist.get_rank())
    return logits.clone() if dist.get_rank() == 0 else None


def gradients_on_rank(
    folder: Path, layout: Layout, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    return gradients_of(folder, layout, dtype, dist.get_rank())


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_logits_do_not_depend_on_the_layout(miniature: Any, ranks: Any, tp: int, ep: int) -> None:
    folder, _ = miniature
    whole = logits_of(folder, Layout())
    assert whole.std() > 0.3
    parts = ranks(tp).run(logits_on_rank, folder, Layout(tp=tp, ep=ep))
    assert (parts[0] - whole).abs().max() <= LOGITS


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2)])
def test_decoding_does_not_depend_on_the_layout(
    miniature: Any, ranks: Any, tp: int, ep: int
) -> None:
    folder, spec = miniature
    whole = logits_of(folder, Layout())[LENGTHS[0] :]
    assert (decoded(folder, spec, Layout()) - whole).abs().max() <= LOGITS
    parts = ranks(tp).run(decoded_on_rank, folder, spec, Layout(tp=tp, ep=ep))
    assert (parts[0] - whole).abs().max() <= LOGITS


@pytest.mark.parametrize(
    ("tp", "ep", "dtype", "limit"),
    [
        (2, 1, torch.float64, GRADIENTS),
        (2, 2, torch.float64, GRADIENTS),
        (4, 2, torch.float64, GRADIENTS),
        (2, 1, torch.float32, GRADIENTS_FP32),
    ],
)
def test_gradients_equal_those_of_one_rank(
    miniature: Any, ranks: Any, tp: int, ep: int, dtype: torch.dtype, limit: float
) -> None:
    folder, spec = miniature
    loss, whole = gradients_of(folder, Layout(), dtype)
    rules = {rule.name: rule for rule in spec.tensors if not rule.unused}
    layout = Layout(tp=tp, ep=ep)
    answers = ranks(tp).run(gradients_on_rank, folder, layout, dtype)
    for rank, (rank_loss, found) in enumerate(answers):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert set(found) == set(whole)
        place = layout.place(rank)
        for name, gradient in found.items():
            if ".experts.w" in name:
                want = _expert_part(whole[name], name, layout, rank)
            else:
                part = slice_for(rules[name], spec.facts, place)
                assert part is not None
                want = whole[name].narrow(part.dim, part.start, part.stop - part.start)
                want = torch.cat((want, want.new_zeros(part.padded, *want.shape[1:])))
            scale = whole[name].abs().max()
            assert scale > 0, name
            assert (gradient - want).abs().max() <= limit * scale, f"rank {rank}: {name}"


def test_gradients_reach_every_parameter(miniature: Any) -> None:
    folder, _ = miniature
    module = load_model(folder, trainable=True)
    _, found = gradients_of(folder, Layout())
    silent = {name for name, _ in module.named_parameters()} - set(found)
    # The first layer has no earlier sum to mix; a router's bias takes part in the choice alone;
    # the text has no image.
    expected = {"layers.0.attention_mix.norm", "layers.0.attention_mix.query"}
    expected |= {n for n, _ in module.named_parameters() if n.endswith("router.bias")}
    seen = {n for n, _ in module.named_parameters() if n.startswith(("vision.", "projector."))}
    assert silent == expected | seen
    grid, pixels = (1, 4, 6), torch.randn(24, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    features = module.encode(pixels, [grid])[0]
    features.square().mean().backward()
    named = dict(module.named_parameters())
    assert all(named[name].grad.abs().max() > 0 for name in seen)


def test_image_features_pass_gradients_to_the_tower(miniature: Any) -> None:
    module = load_model(miniature[0], trainable=True)
    pixels = torch.randn(16, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    rows_MD = module.encode(pixels, [(1, 4, 4)])[0]
    batch = replace(pack_whole(LENGTHS), features=PlacedFeatures(torch.arange(2, 6), rows_MD))
    module.head(module(batch_ids()[0], batch)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.vision.parameters())


def test_the_oracle_miniature_may_not_be_cut() -> None:
    facts = open_source(CHECKPOINT).spec.facts
    check_layout(facts, Layout())
    for layout in (Layout(tp=2), Layout(tp=4), Layout(tp=2, ep=2), Layout(tp=3)):
        with pytest.raises(LayoutError, match=r"KDA heads?"):
            check_layout(facts, layout)


def _expert_part(whole: Tensor, name: str, layout: Layout, rank: int) -> Tensor:
    """The experts and the columns of width that one rank holds of a stacked gradient."""
    place, dim = layout.place(rank), 2 if name.endswith("w2") else 1
    experts = whole.chunk(layout.ep, 0)[place.ep_index]
    return experts.chunk(layout.expert_tp, dim)[place.expert_tp_index]


@torch.inference_mode()
def image_logits_of(folder: Path, layout: Layout, rank: int = 0) -> Tensor:
    """Logits of a prompt whose tokens 2..7 are an image's features."""
    module = load_model(folder, layout=layout, rank=rank, group=_group(layout))
    pixels = torch.randn(24, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    rows_MD = module.encode(pixels, [(1, 4, 6)])[0]
    batch = replace(pack_whole(LENGTHS), features=PlacedFeatures(torch.arange(2, 8), rows_MD))
    logits: Tensor = module.head(module(batch_ids()[0], batch))
    return logits


def image_logits_on_rank(folder: Path, layout: Layout) -> Tensor | None:
    logits = image_logits_of(folder, layout, dist.get_rank())
    return logits.clone() if dist.get_rank() == 0 else None


def test_image_prompts_do_not_depend_on_the_layout(miniature: Any, ranks: Any) -> None:
    folder, _ = miniature
    whole, text = image_logits_of(folder, Layout()), logits_of(folder, Layout())
    assert (whole - text).abs().max() > 0.1  # the image is seen
    parts = ranks(2).run(image_logits_on_rank, folder, Layout(tp=2, ep=2))
    assert (parts[0] - whole).abs().max() <= LOGITS
