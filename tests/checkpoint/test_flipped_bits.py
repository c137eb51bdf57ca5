"""A bit that changed anywhere in a store is reported before the store gives a byte to a model."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.adapt.shard import ShardOptions, shard
from firstlight.adapt.verify import verify_store
from firstlight.assembly.source import open_source
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import parameter_shapes
from firstlight.checkpoint.store_layout import gaps
from firstlight.errors import BadInput, DigestMismatch
from firstlight.sharding.layout import Layout
from tiny_checkpoints import write_checkpoint


class Answers:
    """Writes a file of answers, as a recorder does."""

    def on_unit(self, unit, tensors):
        """Takes a unit."""

    def finish(self, store):
        (store / "answers").mkdir()
        (store / "answers/known.json").write_text('{"tokens": [1, 2, 3]}')


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with blocks on page boundaries, so with padding between them too."""
    folder = tmp_path_factory.mktemp("bits")
    write_checkpoint(folder / "hf", "llama-bias", hidden_size=48, vocab_size=22_000)
    (folder / "hf/tokenizer_config.json").write_text('{"bos_token": "a"}')
    shard(folder / "hf", folder / "store", ShardOptions(hook=Answers()))
    return folder / "store"


def use(path):
    """Does what a rank does before it serves."""
    source = open_source(path)
    for layout in (Layout(), Layout(tp=2, pp=2)):
        for rank in range(layout.world_size):
            place = layout.place(rank)
            shapes = parameter_shapes(source.spec, place)
            parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
            load_into(parameters, source.weights, source.spec, place)


@contextmanager
def flipped(path, bit):
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(damaged)
        yield
    finally:
        path.write_bytes(whole)


def kinds(store):
    """The files of a store by what they are: each kind is tried, whatever its size."""
    found = {}
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        found.setdefault((path.parent.name, path.suffix), []).append(path)
    return found


def test_the_store_as_it_is_can_be_used(store):
    use(store)
    assert {folder for folder, _ in kinds(store)} == {"store", "units", "model", "answers"}


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_flipped_bit_anywhere_stops_the_load_and_fails_verify(store, data):
    path = data.draw(st.sampled_from(data.draw(st.sampled_from(list(kinds(store).values())))))
    bit = data.draw(st.integers(0, path.stat().st_size * 8 - 1))
    with flipped(path, bit):
        with pytest.raises((BadInput, DigestMismatch)):
            use(path.parent if path.parent.name == "store" else path.parents[1])
        assert not verify_store(store).passed


def test_a_bit_in_the_padding_between_blocks_is_found_too(store):
    source = open_source(store)
    padded = [(u, gap) for u in source.weights.manifest.units for gap in gaps(u)]
    assert padded
    for unit, (offset, length) in padded:
        path = source.weights.bin_path(unit.name)
        with (
            flipped(path, (offset + length - 1) * 8 + 7),
            pytest.raises(DigestMismatch, match="padding from byte"),
        ):
            use(store)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_model_file_that_is_gone_is_named(store, tmp_path, name):
    copy = shutil.copytree(store, tmp_path / "store")
    (copy / "model" / name).unlink()
    with pytest.raises(BadInput, match=name.replace(".", r"\.")):
        use(copy)
