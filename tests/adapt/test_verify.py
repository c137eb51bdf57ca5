"""Every kind of damage to a store is found, and named down to the granule."""

import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.adapt.shard import shard
from firstlight.adapt.verify import verify_store
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.store_layout import (
    granule_bytes,
    granule_keys,
    granule_offset,
)
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    write_checkpoint(folder / "hf", "llama-bias")
    shard(folder / "hf", folder / "store")
    return folder / "store"


@pytest.fixture
def copy(store, tmp_path):
    return shutil.copytree(store, tmp_path / "store")


def test_a_whole_store_passes_every_step(store):
    report = verify_store(store)
    assert report.passed
    assert [step.number for step in report.steps] == [1, 2, 3, 4, 5, 6]
    assert all(step.summary for step in report.steps)


@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found_and_its_granule_named(store, data):
    opened = open_store(store)
    unit = data.draw(st.sampled_from(opened.manifest.units))
    path = opened.bin_path(unit.name)
    bit = data.draw(st.integers(0, unit.size * 8 - 1))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        (finding,) = verify_store(store).findings
    finally:
        path.write_bytes(whole)
    owner = [
        key
        for key in granule_keys(unit)
        if 0
        <= bit // 8 - granule_offset(unit, key)
        < granule_bytes(unit.blocks[key.block], key.granule)
    ]
    if not owner:
        assert "padding" in finding.what
        return
    block = unit.blocks[owner[0].block]
    names = ", ".join(part.name for part in block.parts)
    assert finding.where == str(path)
    assert (
        f"unit {unit.name}, block {block.axis}, granule {owner[0].granule} ({names})"
        in finding.what
    )


def test_every_damaged_granule_is_listed_not_only_the_first(copy):
    path = open_store(copy).bin_path("layer-001")
    path.write_bytes(bytes(~b & 255 for b in path.read_bytes()))
    unit = open_store(copy).units["layer-001"]
    found = [f for f in verify_store(copy).findings if "differs from its digest" in f.what]
    assert len(found) == len(list(granule_keys(unit)))


def test_two_swapped_granules_are_found(copy):
    store = open_store(copy)
    unit = store.units["embed"]
    path, size = store.bin_path("embed"), granule_bytes(unit.blocks[0], 0)
    raw = path.read_bytes()
    path.write_bytes(raw[size : 2 * size] + raw[:size] + raw[2 * size :])
    assert len(verify_store(copy).findings) == 2


def step_titles(report):
    return [step.title for step in report.steps if not step.passed]


def test_a_truncated_unit_is_named_with_sizes(copy):
    path = copy / "units/layer-000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    report = verify_store(copy)
    assert step_titles(report) == ["sizes of files"]
    assert re.search(r"holds [\d,]+ bytes, the manifest says", report.findings[0].what)


@pytest.mark.parametrize("name", ["units/embed.bin", "units/head.idx", "model/config.json"])
def test_an_absent_file_is_named(copy, name):
    (copy / name).unlink()
    report = verify_store(copy)
    assert [f.where for f in report.findings] == [str(copy / name)]
    assert report.findings[0].what == "the file is absent"


@pytest.mark.parametrize("name", ["units/embed.idx", "model/config.json"])
def test_a_changed_file_is_named(copy, name):
    raw = bytearray((copy / name).read_bytes())
    raw[3] ^= 1
    (copy / name).write_bytes(raw)
    report = verify_store(copy)
    assert (
        len(report.findings) == 1 and name.split("/")[1].split(".")[0] in report.findings[0].where
    )


@pytest.mark.parametrize("name", ["units/stray.bin", "model/extra.json", "answers/x.json"])
def test_a_file_nobody_recorded_is_named(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("x")
    assert [f.where for f in verify_store(copy).findings] == [str(copy / name)]


@pytest.mark.parametrize("name", ["manifest.json", "COMPLETE"])
def test_without_a_sound_manifest_nothing_else_is_trusted(copy, name):
    raw = bytearray((copy / name).read_bytes())
    raw[10] ^= 1
    (copy / name).write_bytes(raw)
    report = verify_store(copy)
    assert step_titles(report) == ["manifest"] and len(report.steps) == 1


def test_an_unfinished_store_is_said_to_be_one(copy):
    (copy / "COMPLETE").unlink()
    assert "unfinished store" in verify_store(copy).findings[0].what
