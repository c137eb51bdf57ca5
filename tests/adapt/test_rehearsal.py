"""A rehearsal checkpoint has the files, names and sizes of the real one and none of its bytes."""

import shutil

import pytest
import torch

from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.rehearsal import write_rehearsal
from firstlight.checkpoint.names import require_match
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.shard_map import ShardMap
from firstlight.errors import StoreError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from tiny_checkpoints import write_checkpoint
from tiny_kimi import K3_DATA, MINIATURE


def test_headers_are_those_of_the_real_files(tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(MINIATURE / name, tmp_path / name)
    made = write_rehearsal(tmp_path / "config.json", tmp_path / "made")
    ours, real = open_checkpoint(tmp_path / "made"), open_checkpoint(MINIATURE)
    assert made.files == 12 and made.tensors == 834
    assert {n: (i.file.name, i.dtype, i.shape) for n, i in ours.tensors.items()} == {
        n: (i.file.name, i.dtype, i.shape) for n, i in real.tensors.items()
    }
    assert inspect_path(tmp_path / "made").sound


def test_without_an_index_each_unit_is_a_file(tmp_path):
    write_checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    made = write_rehearsal(tmp_path / "hf" / "config.json", tmp_path / "made")
    assert made.files == 4 and inspect_path(tmp_path / "made").sound
    with pytest.raises(StoreError, match="must be an empty"):
        write_rehearsal(tmp_path / "hf", tmp_path / "made")


@pytest.mark.slow
def test_the_published_model_at_its_full_size(tmp_path):
    made = write_rehearsal(K3_DATA / "real", tmp_path / "k3")
    assert made.files == 96 and made.tensors == 497_220
    assert made.num_bytes > 1_560_860_324_864 and made.disk_bytes < 200_000_000
    report = inspect_path(tmp_path / "k3")
    assert report.sound and not report.computed and report.num_bytes == 1_560_860_324_864
    checkpoint = open_checkpoint(tmp_path / "k3")
    spec = read_model_spec(checkpoint.config())
    names = require_match(checkpoint, spec)
    for layout in (Layout(tp=8), Layout(tp=8, ep=8), Layout(pp=2, tp=8), Layout(tp=16)):
        made_map = ShardMap(names, spec, layout)
        assert made_map.uncovered() == []
        assert made_map.source_bytes().total == report.num_bytes
        last = layout.world_size - 1
        assert sum(r.count * r.num_bytes for r in made_map.runs(last)) == (
            made_map.shares[last].num_bytes
        )
