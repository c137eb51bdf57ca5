"""What the documented stacks refuse or get wrong, by architecture; everything else is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

FP8 = torch.float8_e4m3fn


def _product(dtype: torch.dtype) -> torch.Tensor:
    square = torch.ones(16, 16).to(dtype).to("musa")
    return square @ square


WORK: dict[str, Callable[[], object]] = {
    "bf16 product": lambda: _product(torch.bfloat16),
    "bf16 norm": lambda: torch.ones(4, device="musa", dtype=torch.bfloat16).square(),
    "bf16 copy": lambda: torch.ones(4).bfloat16().to("musa").clone(),
    "fp16 product": lambda: _product(torch.float16),
    "fp64 product": lambda: _product(torch.float64),
    "fp64 sum": lambda: torch.ones(4, dtype=torch.float64, device="musa").cumsum(0),
    "fp8 copy": lambda: torch.ones(4).to(FP8).to("musa").clone(),
    "fp8 compare": lambda: torch.ones(4).to(FP8).to("musa") == 0,
    "complex product": lambda: torch.view_as_complex(torch.ones(4, 2, device="musa")).square(),
    "int8 product": lambda: torch._int_mm(*(torch.ones(32, 32).char().to("musa"),) * 2),
    "uint8 sum": lambda: torch.ones(4, dtype=torch.uint8, device="musa").sum(),
    "bool prod": lambda: torch.ones(4, dtype=torch.bool, device="musa").prod(),
}
ALWAYS = {"fp64 product", "fp64 sum", "int8 product", "complex product"}
REFUSED = {
    31: ALWAYS,
    22: ALWAYS | {"fp8 compare", "uint8 sum"},
    21: ALWAYS | {"fp8 compare", "uint8 sum", "bf16 product", "bf16 norm", "bool prod"},
}


def refused() -> set[str]:
    found = set()
    for name, work in WORK.items():
        try:
            work()
        except RuntimeError as error:
            assert "not implemented for" in str(error), (name, str(error))
            found.add(name)
    return found


@pytest.mark.parametrize("arch", [31, 22, 21])
def test_each_architecture_refuses_what_it_lacks(emulated: Any, arch: int) -> None:
    variables = {} if arch == 31 else {"EMULATED_MUSA_ARCH": str(arch)}
    assert emulated(**variables).run(refused)[0] == REFUSED[arch]


def widened_products() -> list[bool]:
    left, right = torch.randn(4, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    wide = torch.mm(left.to("musa"), right.to("musa"), out_dtype=torch.float32).cpu()
    plain = torch.mm(left.to("musa"), right.to("musa")).cpu()
    exact = left.float() @ right.float()
    return [
        wide.dtype == torch.float32 and wide.shape == exact.shape,
        torch.allclose(wide, exact, atol=1e-2),
        torch.allclose(plain.float(), exact, atol=0.1),
    ]


def test_products_with_an_output_type_are_silently_wrong(emulated: Any) -> None:
    """As on torch_musa 2.11.0.post1: no error, and numbers that mean nothing."""
    assert emulated().run(widened_products)[0] == [True, False, True]
    fixed = emulated(EMULATED_MUSA_OUT_DTYPE="right")
    assert fixed.run(widened_products)[0] == [True, True, True]


def same_as_host() -> list[str]:
    """Names of operations whose results differ from the processor's."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    works: dict[str, Callable[[torch.Tensor], Any]] = {
        "view": lambda t: t.t()[1:, ::2].unflatten(0, (7, 1)),
        "in place": lambda t: t.clone().mul_(2).t_().add_(1),
        "inside a view": lambda t: _filled(t.clone()),
        "mask": lambda t: t[t > 0],
        "sorted": lambda t: t.sort(-1).indices,
        "split": lambda t: torch.cat(t.split([1, 5])[::-1]),
        "output": lambda t: torch.add(t, 1, out=torch.empty(0, device=t.device)),
        "expand": lambda t: t[:, :1].expand(6, 3) * t[:, 1:2],
        "unique": lambda t: torch.unique((t * 2).int(), return_counts=True)[1],
        "scalar": lambda t: t.sum().item(),
        "empty": lambda t: t[:0].sum(0),
        "attention": lambda t: torch.nn.functional.scaled_dot_product_attention(t, t, t),
    }
    found = []
    for name, work in works.items():
        host, device = torch.as_tensor(work(x)), torch.as_tensor(work(x.to("musa"))).cpu()
        if host.dtype != device.dtype or not torch.equal(host, device):
            found.append(name)
    return found


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1:3, ::2] = 9.0
    tensor.narrow(1, 2, 3).zero_()
    return tensor


def test_everything_else_is_what_the_processor_computes(emulated: Any) -> None:
    assert emulated().run(same_as_host)[0] == []


def gradients() -> bool:
    torch.manual_seed(2)
    layer = torch.nn.Linear(8, 4)
    x = torch.randn(3, 8)
    layer(x).square().sum().backward()
    wanted = layer.weight.grad.clone()
    layer.zero_grad()
    moved = layer.to("musa")
    moved(x.to("musa")).square().sum().backward()
    return torch.allclose(moved.weight.grad.cpu(), wanted, atol=1e-6)


def test_gradients_are_computed(emulated: Any) -> None:
    assert emulated().run(gradients) == [True]
