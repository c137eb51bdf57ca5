"""Kimi weights in any legal layout, from a checkpoint or its store, re-assemble to the source."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from firstlight.adapt.export import export_store
from firstlight.adapt.shard import ShardOptions, shard
from firstlight.adapt.verify import verify_store
from firstlight.assembly.source import open_source
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes, targets_of
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.errors import LayoutError, TensorError
from firstlight.sharding.layout import Layout
from tiny_kimi import MINIATURE, linear_config, wide_config, write_kimi_checkpoint

SMALL = {"hidden_size": 32, "routed_expert_hidden_size": 32, "num_experts": 12}


def allocate(spec, place, dtype=torch.float32):
    kept = kept_types(spec)
    return {
        name: torch.full(shape, 77, dtype=TORCH_TYPES[kept[name]] if name in kept else dtype)
        for name, shape in parameter_shapes(spec, place).items()
    }


def load(source, place, dtype=torch.float32):
    parameters = allocate(source.spec, place, dtype)
    load_into(parameters, source.weights, source.spec, place)
    return parameters


def read_all(folder):
    return {
        n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()
    }


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def assert_slices(parameters, tensors, spec, place):
    """Compares each part with the source: dealt experts, cut runs, whole A_log without its tail."""
    seen = set()
    for target in targets_of(spec, place):
        rule, part, name, stacked = target.rule, target.part, target.name, target.stacked
        seen.add(name)
        loaded = parameters[name] if stacked is None else parameters[name][stacked]
        whole = tensors[rule.source]
        if rule.source_rows is not None:
            whole = whole[slice(*rule.source_rows)]
        length = part.stop - part.start
        wanted = whole.narrow(part.dim, part.start, length).to(loaded.dtype)
        assert torch.equal(loaded.narrow(part.dim, 0, length), wanted), name
        assert not loaded.narrow(part.dim, length, part.padded).any(), name
    assert seen == set(parameters)


def assert_experts(parameters, tensors, place):
    """A rank has the experts of its own run of ids, and of each one run of its width."""
    count = 12 // place.layout.ep
    ids = range(place.ep_index * count, (place.ep_index + 1) * count)
    for name in [n for n in parameters if ".experts." in n]:
        layer, kind = name.split(".")[1], name.rpartition(".")[2]
        letter, _, form = kind.partition("_")
        leaf = f"{letter}.weight_{form}" if form else f"{letter}.weight"
        source = next(n for n in tensors if f"layers.{layer}." in n and n.endswith(f".7.{leaf}"))
        whole = torch.stack([tensors[source.replace(".7.", f".{n}.", 1)] for n in ids])
        parts = whole.chunk(place.layout.expert_tp, dim=2 if letter == "w2" else 1)
        wanted = parts[place.expert_tp_index].to(parameters[name].dtype)
        assert torch.equal(parameters[name], wanted), name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The sources of a wide Kimi K3 and a wide Kimi Linear: {name: (checkpoint, store, tensors)}"""
    known = {}
    linear = {k: v for k, v in SMALL.items() if not k.startswith("routed")}
    configs = {"kimi_k3": wide_config(**SMALL), "kimi_linear": linear_config(**linear)}
    for name, config in configs.items():
        folder = tmp_path_factory.mktemp(name)
        tensors = write_kimi_checkpoint(folder / "hf", config)
        shard(folder / "hf", folder / "store")
        known[name] = (open_source(folder / "hf"), open_source(folder / "store"), tensors)
    return known


@st.composite
def legal_layouts(draw):
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    dp = draw(st.integers(1, 2))
    ways = [e for e in (1, 2, 3, 4, 6, 12) if tp * dp % e == 0 and 12 % (tp * dp // e) == 0]
    return Layout(tp=tp, dp=dp, pp=draw(st.integers(1, 2)), ep=draw(st.sampled_from(ways)))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["kimi_k3", "kimi_linear"]),
    from_store=st.booleans(),
    layout=legal_layouts(),
    data=st.data(),
)
def test_any_rank_of_any_legal_layout_holds_its_part(made, name, from_store, layout, data):
    source, tensors = made[name][from_store], made[name][2]
    place = layout.place(data.draw(st.integers(0, layout.world_size - 1)))
    parameters = load(source, place)
    assert_slices(parameters, tensors, source.spec, place)
    assert_experts(parameters, tensors, place)


@pytest.mark.parametrize("from_store", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=3, ep=3, pp=2)], ids=str)
def test_the_miniature_loads_in_its_legal_layouts(tmp_path, from_store, layout):
    if from_store:
        shard(MINIATURE, tmp_path / "store")
    source = open_source(tmp_path / "store" if from_store else MINIATURE)
    tensors = read_all(MINIATURE)
    for rank in range(layout.world_size):
        place = layout.place(rank)
        assert_slices(load(source, place, torch.bfloat16), tensors, source.spec, place)


def test_a_layout_that_cuts_a_head_or_a_scale_group_is_refused():
    source = open_source(MINIATURE)
    for layout in (Layout(tp=2), Layout(tp=5), Layout(dp=2)):
        with pytest.raises(LayoutError, match="does not divide"):
            load_into({}, source.weights, source.spec, layout.place(0))


def test_kept_types_are_demanded_of_the_caller_and_of_the_file(made, tmp_path):
    source, _, tensors = made["kimi_k3"]
    place = Layout().place(0)
    parameters = allocate(source.spec, place)
    for name in ("layers.1.moe.routed.experts.w1_packed", "layers.0.attention.dt_bias"):
        parameters[name] = parameters[name].bfloat16()
    with pytest.raises(
        TensorError, match=r"w1_packed: allocated as torch.bfloat16, keeps"
    ) as error:
        load_into(parameters, source.weights, source.spec, place)
    assert "dt_bias: allocated as torch.bfloat16, keeps torch.float32" in str(error.value)
    name = next(n for n in tensors if n.endswith("w1.weight_scale"))
    changed = {**tensors, name: tensors[name].float()}
    write_kimi_checkpoint(tmp_path, wide_config(**SMALL))
    save_file(changed, tmp_path / "model.safetensors")
    broken = open_source(tmp_path)
    with pytest.raises(TensorError, match="F32 values where U8 ones are expected"):
        load(broken, place)


def test_the_store_of_the_miniature_is_whole_and_comes_back_bit_for_bit(tmp_path):
    report = shard(MINIATURE, tmp_path / "store")
    assert report.manifest.coverage.tensors == 834
    assert verify_store(tmp_path / "store").passed
    exported = export_store(tmp_path / "store", tmp_path / "hf")
    assert exported.cast == () and exported.tensors == 834
    source, returned = read_all(MINIATURE), read_all(tmp_path / "hf")
    assert source.keys() == returned.keys()
    assert all(same_bits(source[name], returned[name]) for name in source)
    for name in ("tiktoken.model", "tokenizer_config.json", "preprocessor_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (MINIATURE / name).read_bytes()


def test_experts_stand_expert_major_in_granules_of_one_scale_group(made):
    unit = made["kimi_k3"][1].weights.units["layer-001"]
    blocks = {block.axis: block for block in unit.blocks}
    experts = blocks["expert"]
    assert experts.experts == tuple(range(12)) and experts.granules == 384 // 32
    assert [part.name.rpartition(".")[2] for part in experts.parts] == [
        f"w{n}_{kind}" for n in (1, 2, 3) for kind in ("packed", "scale")
    ]
    assert all(len(part.sources) == 12 for part in experts.parts)
    unused = [part.name for block in unit.blocks for part in block.parts if part.unused]
    assert unused == ["layers.1.attention.A_log_padding"]


def test_a_cast_leaves_alone_what_the_rules_keep(tmp_path):
    shard(MINIATURE, tmp_path, ShardOptions(dtype="fp32"))
    source = open_source(tmp_path)
    kept = kept_types(source.spec)
    for unit in source.weights.manifest.units:
        for part in (p for block in unit.blocks for p in block.parts):
            assert part.dtype == (part.source_dtype if part.name in kept else "F32"), part.name


class _Stop(Exception):
    pass


def test_a_conversion_killed_among_experts_resumes_to_the_same_bytes(tmp_path):
    def stop_in_layer_4(phase, done, total, unit):
        if unit == "layer-004":
            raise _Stop

    with pytest.raises(_Stop):
        shard(MINIATURE, tmp_path / "cut", ShardOptions(progress=stop_in_layer_4, threads=1))
    report = shard(MINIATURE, tmp_path / "cut")
    shard(MINIATURE, tmp_path / "whole")
    assert report.resumed_units == 5
    files = {
        p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file()
    }
    assert files == {
        p.relative_to(tmp_path / "cut") for p in (tmp_path / "cut").rglob("*") if p.is_file()
    }
    for file in files:
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
