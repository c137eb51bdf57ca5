"""The map from source bytes to ranks uses every byte once or as often as declared."""

import numpy as np
import pytest

from firstlight.checkpoint.names import require_match
from firstlight.checkpoint.read_plan import plan_tensor_reads, targets_of
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.shard_map import ShardMap
from firstlight.errors import LayoutError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from tiny_checkpoints import write_checkpoint

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4, ep=2),
    Layout(tp=4, ep=4),
    Layout(tp=2, dp=2, ep=4),
    Layout(pp=2, tp=3),
    Layout(tp=12),
]


def mapped(folder, layout):
    checkpoint = open_checkpoint(folder)
    spec = read_model_spec(checkpoint.config())
    report = require_match(checkpoint, spec)
    return checkpoint, spec, report, ShardMap(report, spec, layout)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    write_layout_miniature(folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_byte_is_taken_as_often_as_its_class_says(kimi, layout):
    checkpoint, _, _, made = mapped(kimi, layout)
    taken = {path: np.zeros(path.stat().st_size, np.int16) for path in checkpoint.files}
    for rank in range(layout.world_size):
        num_bytes = tensors = 0
        for runs in made.runs(rank):
            tensors += 1
            for number in range(runs.count):
                start = runs.offset + number * runs.pitch
                taken[runs.file][start : start + runs.num_bytes] += 1
                num_bytes += runs.num_bytes
        share = made.shares[rank]
        assert (share.tensors, share.num_bytes) == (tensors, num_bytes)
    uses = np.concatenate(
        [taken[i.file][i.offset :][: i.num_bytes] for i in checkpoint.tensors.values()]
    )
    found = made.source_bytes()
    assert made.uncovered() == []
    assert found.once == (uses == 1).sum() and found.unused == (uses == 0).sum()
    assert found.shared == (uses > 1).sum() and found.total == uses.size
    assert set(np.unique(uses[uses > 1])) <= {layout.tp, layout.dp, layout.dp * layout.tp}


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3"])
def test_the_map_takes_the_rows_the_loader_reads(tmp_path, family):
    write_checkpoint(tmp_path, family)
    layout = Layout(tp=2)
    _, spec, report, made = mapped(tmp_path, layout)
    for rank in range(2):
        reads = plan_tensor_reads(report, targets_of(spec, layout.place(rank)))
        whole = {read.source: (read.offset, read.num_bytes) for read in reads}
        runs = {run.source: run for run in made.runs(rank)}
        assert runs.keys() == whole.keys()
        for name, run in runs.items():
            if run.count == 1:  # else whole rows are read of which columns are taken
                assert (run.offset, run.num_bytes) == whole[name]


def test_an_illegal_layout_is_refused(kimi):
    with pytest.raises(LayoutError, match="legal tp"):
        mapped(kimi, Layout(tp=5))
