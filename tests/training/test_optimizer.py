"""Muon makes a matrix's step orthogonal and leaves tables to AdamW."""

import torch
from torch import nn

from firstlight.training.optimizer import Muon, make_optimizer, orthogonal


def test_singular_values_come_near_one_also_for_stacks() -> None:
    torch.manual_seed(0)
    for shape in ((16, 48), (48, 16), (3, 24, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.3 and values.max() < 1.3


def test_matrices_move_alike_in_all_directions_and_tables_as_adamw_moves_them() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"proj": nn.Linear(16, 32, bias=False), "embed": nn.Embedding(8, 4)})
    reference = nn.Embedding(8, 4)
    reference.load_state_dict(module["embed"].state_dict())
    before = module["proj"].weight.detach().clone()
    muon = make_optimizer(module, rate=0.01, weight_decay=0.0, muon=True)
    adamw = torch.optim.AdamW(
        reference.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0
    )
    for step in range(3):
        grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        module["embed"].weight.grad, reference.weight.grad = grad, grad.clone()
        module["proj"].weight.grad = torch.randn(32, 16) if step == 0 else None
        muon.step()
        adamw.step()
    assert torch.allclose(module["embed"].weight, reference.weight, atol=1e-6)
    moved = torch.linalg.svdvals(before - module["proj"].weight.detach())
    assert moved.min() / (0.01 * 0.2 * 32**0.5) > 0.3 and moved.max() / moved.min() < 4


def test_its_state_is_kept_and_taken_up_again() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    first = Muon(module, rate=0.01, weight_decay=0.1)
    module(torch.ones(2, 8)).sum().backward()
    first.step()
    second = Muon(module, rate=0.01, weight_decay=0.1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(
        second.state[module.weight]["momentum"], first.state[module.weight]["momentum"]
    )
