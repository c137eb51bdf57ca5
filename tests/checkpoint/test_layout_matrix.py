"""One store serves every layout: what all ranks load, put together, is the source bit for bit."""

import json
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from firstlight.adapt.export import export_store
from firstlight.adapt.shard import ShardOptions, shard
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes, targets_of
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.errors import LayoutError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import check_layout, legal_degrees
from k3_layouts import layout_tensors, write_layout_miniature
from tiny_checkpoints import tiny_config, write_checkpoint


class Assembly:
    """Source tensors put together again from the parts of ranks, and how often each row came."""

    def __init__(self, spec, tensors):
        self.spec, self.tensors = spec, tensors
        self.counts = {}

    def add(self, place, parameters):
        """Compares a rank's parts with the source, bit for bit, and counts what they cover."""
        for target in targets_of(self.spec, place):
            rule, part = target.rule, target.part
            loaded = parameters[target.name]
            loaded = loaded if target.stacked is None else loaded[target.stacked]
            whole = self.tensors[rule.source]
            if rule.source_rows is not None:
                whole = whole[slice(*rule.source_rows)]
            length = part.stop - part.start
            if part.zero or not rule.shape:
                continue
            wanted = whole.narrow(part.dim, part.start, length)
            assert same_bits(loaded.narrow(part.dim, 0, length), wanted), (rule.source, place)
            assert not loaded.narrow(part.dim, length, part.padded).float().any()
            key = (rule.source, rule.source_rows)
            if key not in self.counts:
                self.counts[key] = torch.zeros(rule.shape[part.dim], dtype=torch.int)
            self.counts[key][part.start : part.stop] += 1

    def check(self):
        """Every row of every tensor has come, and all rows of one equally often."""
        keys = {(r.source, r.source_rows) for r in self.spec.tensors if r.shape and not r.unused}
        assert keys <= set(self.counts)
        for key, counts in self.counts.items():
            assert counts.min() == counts.max() > 0, key


def same_bits(left, right):
    left, right = left.contiguous(), right.contiguous()
    return left.dtype == right.dtype and torch.equal(
        left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)
    )


def load(store, spec, place, dtype):
    kept = kept_types(spec)
    parameters = {
        name: torch.full(shape, 7, dtype=TORCH_TYPES[kept[name]] if name in kept else dtype)
        for name, shape in parameter_shapes(spec, place).items()
    }
    load_into(parameters, store, spec, place)
    return parameters


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    spec = write_layout_miniature(folder / "hf")
    shard(folder / "hf", folder / "store")
    return open_store(folder / "store"), spec, layout_tensors(spec)


LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=dp, ep=ep)
    for tp, pp, dp, ep in product((1, 2, 3, 4, 6, 12), (1, 2), (1, 2), (1, 2, 4))
    if tp * dp % ep == 0
]
# One of each kind; the others are `thorough`, two minutes of them.
QUICK = (Layout(), Layout(tp=3, pp=2), Layout(tp=4, ep=4), Layout(tp=2, pp=2, dp=2, ep=4))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=() if layout in QUICK else pytest.mark.thorough)
        for layout in LAYOUTS
    ],
)
def test_all_ranks_of_a_layout_put_together_are_the_source(miniature, layout):
    store, spec, tensors = miniature
    width = layout.tp * layout.dp // layout.ep  # an expert's 384 values are 12 groups of scales
    if 12 % width:
        with pytest.raises(LayoutError, match="does not divide"):
            check_layout(spec.facts, layout)
        return
    assembly = Assembly(spec, tensors)
    for rank in range(layout.world_size):
        place = layout.place(rank)
        assembly.add(place, load(store, spec, place, torch.bfloat16))
    assembly.check()


@st.composite
def models(draw):
    """A Llama whose widths fit groups of scales, and a layout that its heads allow."""
    heads, groups = draw(st.sampled_from([(4, 2), (4, 4), (6, 3), (8, 1), (8, 8)]))
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([32, 64])),
        "hidden_size": draw(st.sampled_from([128, 256])),
        "intermediate_size": draw(st.sampled_from([256, 384, 512])),
        "vocab_size": draw(st.integers(1, 400)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    codec = draw(st.sampled_from(["keep", "bf16", "int8", "int4", "fp8", "fp8-block", "mxfp4"]))
    layout = Layout(
        tp=draw(st.sampled_from([1, 2, 3, 4, 8])),
        pp=draw(st.integers(1, config["num_hidden_layers"])),
        dp=draw(st.integers(1, 2)),
    )
    return config, codec, layout


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(model=models())
def test_ranks_of_any_model_codec_and_layout_hold_every_value_once(tmp_path_factory, model):
    config, codec, layout = model
    folder = tmp_path_factory.mktemp("any")
    spec = read_model_spec(tiny_config(**config))
    write_checkpoint(folder / "hf", dtype=torch.float32, **config)
    shard(folder / "hf", folder / "store", ShardOptions(dtype=codec))
    export_store(folder / "store", folder / "back")
    tensors = {n: t for path in (folder / "back").glob("*.safetensors") for n, t in
               load_file(path).items()}  # fmt: skip
    if codec == "keep":
        source = load_file(folder / "hf/model.safetensors")
        assert source.keys() == tensors.keys()
        assert all(same_bits(source[name], tensors[name]) for name in source)
    store, assembly = open_store(folder / "store"), Assembly(spec, tensors)
    dtype = torch.bfloat16 if codec == "bf16" else torch.float32
    try:
        for rank in range(layout.world_size):
            place = layout.place(rank)
            assembly.add(place, load(store, spec, place, dtype))
    except LayoutError:  # heads that do not divide, or groups of scales that it would cut
        assert codec != "keep" or layout.tp not in legal_degrees(spec.facts.axes)
        return
    assembly.check()
    assert json.loads((folder / "back/config.json").read_text())["vocab_size"] == spec.vocab_size
