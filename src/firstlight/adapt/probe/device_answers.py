"""Owns operations of torch whose results are known, run on a device and compared with the CPU's.

Small integers are used where a type holds them exactly, so that right means equal. What a device
lacks is said apart from what it gets wrong: only the latter forbids serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.adapt.probe.findings import words_of
from firstlight.platforms.find import find_platform
from firstlight.platforms.spec import DeviceSpec
from firstlight.platforms.tools import GraphPool, copy_to, new_stream, pinned

SIDE = 96


@dataclass(frozen=True)
class Case:
    """One operation: `make` gives its inputs on the CPU, `run` computes on any device.

    `needs` are capabilities without which it is not run; `quirk` names the workaround that avoids
    it. `tolerance` is relative to the largest magnitude expected.
    """

    name: str
    make: Callable[[], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    needs: tuple[str, ...] = ()
    quirk: str = ""
    tolerance: float = 0.0


def _integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _bfloat16_pair() -> tuple[Tensor, ...]:
    return tuple(_integers(SIDE, SIDE, dtype=torch.bfloat16, seed=s) for s in (1, 2))


def _scaled_product(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones((), device=a.device)
    by_columns = b.t().contiguous().t()  # the only order the operation takes its second input in
    narrow = (a.to(torch.float8_e4m3fn), by_columns.to(torch.float8_e4m3fn))
    return torch._scaled_mm(*narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _distinct() -> tuple[Tensor, ...]:
    order = torch.randperm(SIDE * 8, generator=torch.Generator().manual_seed(3))
    return (order.view(8, SIDE).float(),)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _heads() -> tuple[Tensor, ...]:
    return tuple(_normal(1, 4, 33, 64, seed=seed) for seed in (4, 5, 6))


CASES = (
    Case(
        "float32 product", lambda: (_integers(SIDE, SIDE), _integers(SIDE, SIDE, seed=1)), torch.mm
    ),
    Case("bfloat16 product", _bfloat16_pair, torch.mm, ("bfloat16",), tolerance=2**-7),
    Case(
        "product with out_dtype",
        _bfloat16_pair,
        lambda a, b: torch.mm(a, b, out_dtype=torch.float32),
        ("bfloat16",),
        quirk="out_dtype_garbage",
    ),
    Case(
        "float8 product",
        _bfloat16_pair,
        _scaled_product,
        ("float8",),
        tolerance=2**-7,
    ),
    Case("topk", _distinct, lambda x: x.topk(8).indices),
    Case("masked fill", lambda: (_integers(8, SIDE),), lambda x: x.masked_fill(x > 0, -7.0)),
    Case(
        "sum of widened bytes",
        lambda: (_integers(8, SIDE).abs().byte(),),
        lambda x: x.int().sum(-1),
    ),
    Case("gathered rows", lambda: (_integers(8, SIDE),), lambda x: x[x[:, 0].abs().long() % 8]),
    Case("attention", _heads, _attended, tolerance=1e-3),
    Case("softmax", lambda: (_normal(8, SIDE),), lambda x: x.softmax(-1), tolerance=1e-5),
)


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Runs every case on each device, and on the first what a device needs beyond operations."""
    platform = find_platform(words[0])
    found: list[dict[str, str]] = []
    specs = [platform.spec(index) for index in range(platform.count())]
    for spec in specs:
        device = platform.bind(spec.index, 1)
        where = f" on {device}" if len(specs) > 1 else ""
        for case in CASES:
            found.append(_told(f"{case.name}{where}", *run_case(case, device, spec)))
    found += [_told(*entry) for entry in _beyond_operations(specs)]
    return {"answers": found}


def run_case(case: Case, device: str, spec: DeviceSpec) -> tuple[str, str]:
    """Returns (right, wrong, lacking, avoided or unknown, and why). The CPU's float64 is right."""
    lacking = [need for need in case.needs if not spec.can(need)]
    if lacking:
        return "lacking", f"the device has no {', '.join(lacking)}"
    inputs = case.make()
    try:
        found = case.run(*(x.to(device) for x in inputs)).cpu()
    except (NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
        return "lacking", words_of(error)
    if not found.is_floating_point():
        right = torch.equal(found, case.run(*inputs))
        return ("right", "equal") if right else ("wrong", "other numbers than the CPU's")
    expected = expected_of(case, inputs)
    off = float((found.double() - expected).abs().max() / expected.abs().max())
    # A NaN compares false, and so is wrong.
    state = "right" if off <= case.tolerance else "wrong"
    if state == "wrong" and case.quirk and spec.has_quirk(case.quirk):
        state = "avoided"
    return state, f"off by {off:.1e} of {case.tolerance:.1e} allowed"


def expected_of(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the result in float64; products of narrow types are those of their values."""
    wide = tuple(x.double() for x in inputs)
    if "product" in case.name:
        return wide[0] @ wide[1]
    return case.run(*wide)


def _beyond_operations(specs: list[DeviceSpec]) -> list[tuple[str, str, str]]:
    spec = specs[0]
    if spec.can("host_memory"):
        return []
    found = [_in_turn("stream and pinned copy", _streamed, spec), _in_turn("graph", _graph, spec)]
    if len(specs) > 1:
        found += [
            _in_turn(f"copy {a}-{b}", _peer, specs[a], specs[b]) for a, b in _pairs(len(specs))
        ]
    return found


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(index, (index + 1) % count) for index in range(count)]


def _in_turn(name: str, work: Callable[..., str], *specs: DeviceSpec) -> tuple[str, str, str]:
    try:
        wrong = work(*specs)
    except (NotImplementedError, RuntimeError, AttributeError, StopIteration) as error:
        return name, "lacking", words_of(error)
    return (name, "wrong", wrong) if wrong else (name, "right", "equal")


def _streamed(spec: DeviceSpec) -> str:
    """A copy on a second stream, waited for by an event, must bring what was sent."""
    stream, sent = new_stream(spec), pinned(_integers(256, SIDE), spec)
    if stream is None:
        raise RuntimeError("the device has no streams")
    with stream:
        arrived = copy_to(sent, f"{spec.kind}:{spec.index}", spec)
        done = stream.record_event()
    done.synchronize()
    return "" if torch.equal(arrived.cpu(), sent) else "a pinned copy brought other numbers"


def _graph(spec: DeviceSpec) -> str:
    pool = GraphPool(spec)
    if not pool.captures:
        raise RuntimeError("graphs are off on this device")
    x = _integers(8, SIDE).to(f"{spec.kind}:{spec.index}")
    out = torch.empty_like(x)
    pool.run("known", lambda: torch.mul(x, 3.0, out=out))
    x.add_(1.0)
    pool.run("known", lambda: torch.mul(x, 3.0, out=out))
    return "" if torch.equal(out.cpu(), x.cpu() * 3.0) else "a replayed graph gave other numbers"


def _peer(source: DeviceSpec, target: DeviceSpec) -> str:
    """A pattern that no neighbour of a byte repeats, sent from card to card."""
    sent = (torch.arange(2**20, dtype=torch.int64) * 2654435761 % 2**31).int()
    moved = sent.to(f"{source.kind}:{source.index}").to(f"{target.kind}:{target.index}")
    return "" if torch.equal(moved.cpu(), sent) else "a copy between cards brought other numbers"


def _told(name: str, state: str, detail: str) -> dict[str, str]:
    return {"name": name, "state": state, "detail": detail}
