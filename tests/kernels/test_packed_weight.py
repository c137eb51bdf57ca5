"""Tests of lossless packing: every bit comes back, and what does not fit takes a larger format."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.packed_weight import FORMATS, PackedWeight, pack_weight
from firstlight.kernels.reference.packed import unpack
from firstlight.kernels.registry import KernelSet

SETS = {"reference": reference_kernels(), "native": builtin_kernels().resolve(machine_query())}
EDGES = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 6e-8, 65504.0, 3.4e38]


@pytest.fixture(params=list(SETS))
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Return the references, and this machine's kernels where they pack."""
    found = SETS[request.param]
    if request.param == "native" and not found.packs_weights:
        pytest.skip("no native kernels for packed weights here")
    return found


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _check(weight: Tensor, kernels: KernelSet) -> PackedWeight:
    """Pack, and compare both ways back bit by bit."""
    packed = pack_weight(weight, kernels.pack_weight_as)
    assert torch.equal(_bits(unpack(packed)), _bits(weight))
    rows = kernels.packed_rows(packed, torch.arange(len(weight)))
    assert torch.equal(_bits(rows), _bits(weight))
    return packed


@pytest.mark.parametrize("name", [*FORMATS, "float32"])
@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (5, 4224)])
def test_every_format_comes_back(kernels, weight_of, name, shape) -> None:
    packed = _check(weight_of(name, *shape), kernels)
    assert (packed.format, packed.rows, packed.columns) == (name, *shape)


@pytest.mark.parametrize("name", FORMATS)
def test_native_bytes_are_the_references(weight_of, name) -> None:
    weight = weight_of(name, 40, 256)
    ours, plain = (pack_weight(weight, k.pack_weight_as) for k in SETS.values())
    assert torch.equal(ours.data, plain.data)


def test_bytes_of_one_affine_block(kernels) -> None:
    weight = torch.arange(32.0).remainder(16).mul(0.5).sub(3.0).view(1, 32)
    packed = pack_weight(weight, kernels.pack_weight_as)
    wanted = struct.pack("<ee", 0.5, -3.0) + bytes(i | i << 4 for i in range(16))
    assert packed.data.numpy().tobytes() == wanted


def test_bytes_of_one_scaled_block(kernels) -> None:
    q = [127, -127, 5, 0, *range(-14, 14)]
    packed = pack_weight(torch.tensor([q]) * 0.25, kernels.pack_weight_as)
    assert packed.data.numpy().tobytes() == struct.pack("<e32b", 0.25, *q)


def test_columns_that_are_no_whole_blocks_stay(kernels, weight_of) -> None:
    weight = weight_of("bfloat16", 4, 64)[:, :40].contiguous()
    packed = _check(weight, kernels)
    assert packed.format == "float32" and packed.data is weight


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", FORMATS)
def test_an_odd_value_is_kept(kernels, weight_of, name, edge) -> None:
    weight = weight_of(name, 3, 64)
    weight[1, 40] = edge
    _check(weight, kernels)


@pytest.mark.parametrize("step", [0.25, -0.25])
def test_symmetric_four_bits_take_at_most_eight(kernels, step) -> None:
    q = torch.arange(64.0).remainder(16) - 8
    packed = _check((q * step).view(2, 32), kernels)
    # A negative step makes zeros of negative sign, which d * q + m cannot give.
    assert packed.format == ("affine4" if step > 0 else "scaled8")


def test_a_block_that_almost_fits_moves_the_tensor_on(kernels, weight_of) -> None:
    weight = weight_of("affine4", 8, 96)
    _bits(weight)[7, 95] += 1
    assert _check(weight, kernels).format == "float32"


def test_a_row_outside_is_an_error(kernels, weight_of) -> None:
    packed = pack_weight(weight_of("scaled8", 4, 32), kernels.pack_weight_as)
    for row in (-1, 4):
        with pytest.raises(IndexError):
            kernels.packed_rows(packed, torch.tensor([0, row]))
    assert kernels.packed_rows(packed, torch.arange(0)).shape == (0, 32)


HALVES = st.floats(width=16, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(
    step=HALVES,
    base=HALVES,
    q=st.lists(st.integers(-128, 127), min_size=64, max_size=64),
    changes=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 2**32 - 1)), max_size=2),
)
def test_any_block_comes_back(step, base, q, changes) -> None:
    numbers = torch.tensor(q).view(2, 32).float()
    affine = (numbers.abs() % 16) * step + base
    for weight in (affine, numbers * step, affine.bfloat16().float()):
        bits = _bits(weight).numpy().view("uint32")
        for index, value in changes:
            bits[index // 32, index % 32] = value
        for kernels in SETS.values():
            _check(weight, kernels)
