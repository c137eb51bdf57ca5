"""One rank reads, all ranks are filled: the same values as reading for oneself."""

import threading
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from firstlight.adapt.shard import shard
from firstlight.checkpoint.executor import Patience
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.shared_reading import windows_of
from firstlight.checkpoint.store import Store, open_store, read_manifest
from firstlight.checkpoint.store_layout import granule_total
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.errors import EnvironmentProblem, UsageError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from rank_pool import RankFailure


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("kimi")
    write_layout_miniature(made / "hf")
    shard(made / "hf", made / "store")
    return made


@pytest.mark.parametrize("largest", [1, 5_000, 10**9])
def test_windows_hold_every_granule_once(folder, largest):
    for unit in open_store(folder / "store").manifest.units:
        windows = list(windows_of(unit, largest))
        assert [w.first for w in windows[1:]] == [w.stop for w in windows[:-1]]
        assert windows[0].first == 0 and windows[-1].stop == granule_total(unit)
        assert all(a.offset + a.num_bytes <= b.offset for a, b in pairwise(windows))
        assert windows[-1].offset + windows[-1].num_bytes == unit.size


def loaded(folder, layout, rank, group, **more):
    source = Store(folder / "store", read_manifest(folder / "store"))  # sizes not yet looked at
    spec = read_model_spec(open_checkpoint(folder / "hf").config())
    place, kept = layout.place(rank), kept_types(spec)
    parameters = {
        name: torch.full(shape, 7, dtype=TORCH_TYPES[kept.get(name, "BF16")])
        for name, shape in parameter_shapes(spec, place).items()
    }
    seen = []
    report = load_into(
        parameters, source, spec, place, leader_of=group,
        progress=lambda phase, done, total, unit: seen.append((done, total)), **more,
    )  # fmt: skip
    assert seen[-1][0] == seen[-1][1]
    return parameters, report.digest


def read_for_all(folder, layout, rank=0):
    """On each rank: loads through the first one, which alone may open unit files."""
    rank = dist.get_rank()
    opened, init = [], InputFile.__init__

    def note(self, path, *arguments, **more):
        opened.append(path)
        init(self, path, *arguments, **more)

    InputFile.__init__ = note
    try:
        through, digest = loaded(folder, layout, rank, dist.group.WORLD)
    finally:
        InputFile.__init__ = init
    assert bool([p for p in opened if p.suffix == ".bin"]) == (rank == 0)
    own, own_digest = loaded(folder, layout, rank, None)
    assert digest == own_digest
    return all(torch.equal(through[n].view(torch.uint8), own[n].view(torch.uint8)) for n in own)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=4, ep=2), Layout(pp=2, tp=2), Layout(dp=2, ep=2)], ids=str
)
def test_every_rank_holds_what_it_would_have_read(ranks, folder, layout):
    assert all(ranks(layout.world_size).run(read_for_all, folder, layout))


def load_after_cutting(folder, layout, rank=0):
    return loaded(folder, layout, dist.get_rank(), dist.group.WORLD)[1]


DAMAGE = {
    "short": (lambda raw: raw[:-100], "the rank that reads for all: "),
    "flipped": (lambda raw: raw[:-1000] + bytes([raw[-1000] ^ 1]) + raw[-999:], "unit layer-001"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_what_the_reader_finds_ends_the_load_on_all(ranks, folder, damage, words):
    path = open_store(folder / "store").bin_path("layer-001")
    raw = path.read_bytes()
    try:
        path.write_bytes(damage(raw))
        with pytest.raises(RankFailure) as caught:
            ranks(2).run(load_after_cutting, folder, Layout(tp=2))
        assert words in str(caught.value.exception)
    finally:
        path.write_bytes(raw)


def load_from_a_dead_device(folder, layout, rank=0):
    """On each rank: the reader's storage answers no more behind the first window."""
    rank, calls = dist.get_rank(), []
    read = InputFile.read_into

    def hang(self, buffer, offset):
        if threading.current_thread().name == "load-ahead":
            calls.append(offset)
            if len(calls) > 1:
                threading.Event().wait(20)
        return read(self, buffer, offset)

    InputFile.read_into = hang
    try:
        patience = Patience(alert_seconds=0.1, stall_seconds=0.4)
        loaded(folder, layout, rank, dist.group.WORLD, patience=patience)
    except EnvironmentProblem as problem:
        return str(problem)
    finally:
        InputFile.read_into = read
    return ""


def test_a_reader_that_stands_still_is_named_on_all_with_file_and_offset(ranks, folder):
    for said in ranks(2).run(load_from_a_dead_device, folder, Layout(tp=2)):
        assert "rank 0: no byte arrived for" in said
        assert ".bin at byte" in said and "Check that the storage answers" in said


def test_a_checkpoint_is_read_by_each_rank_itself(folder):
    source = open_checkpoint(folder / "hf")
    spec = read_model_spec(source.config())
    with pytest.raises(UsageError, match="from a store only"):
        load_into({}, source, spec, Layout().place(0), leader_of=object())
