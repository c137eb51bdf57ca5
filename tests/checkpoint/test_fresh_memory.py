"""Memory that reads write across is taken once, before the first of them, and stays as it is."""

from pathlib import Path

import torch

from firstlight.adapt.shard import shard
from firstlight.checkpoint.executor import Job, Worker
from firstlight.checkpoint.fresh_memory import with_memory_ahead
from firstlight.checkpoint.granule_plan import plan_granule_reads
from firstlight.checkpoint.read_plan import parameter_shapes, targets_of
from firstlight.checkpoint.store import open_store
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from tiny_checkpoints import tiny_config, write_checkpoint

WIDE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096,
}  # fmt: skip


def test_memory_is_taken_once_before_the_reads_that_write_across_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", dtype=torch.bfloat16, **WIDE)
    shard(tmp_path / "hf", tmp_path / "store")
    spec, place = read_model_spec(tiny_config(**WIDE)), Layout().place(0)
    shapes = parameter_shapes(spec, place)
    parameters = {name: torch.ones(s, dtype=torch.bfloat16) for name, s in shapes.items()}
    units = open_store(tmp_path / "store").manifest.units
    reads = plan_granule_reads(units, targets_of(spec, place), largest_read=2**18)
    jobs = [
        Job(str(number), Path(read.unit.name), read.offset, read.num_bytes, lambda worker: None)
        for number, read in enumerate(reads)
    ]
    found = with_memory_ahead(parameters, reads, jobs)
    taking = [job for job in found if job.num_bytes == 0]
    assert [job for job in found if job.num_bytes] == jobs
    large = [n for n in shapes if n.endswith("down_proj.weight")]
    assert len(taking) == len(large) > 1
    firsts = [job.unit for job in taking]
    assert len(set(firsts)) == len(firsts)
    for job in taking:
        assert found.index(job) < next(
            i for i, j in enumerate(found) if j.unit == job.unit and j.num_bytes
        )
        worker = Worker()
        job.run(worker)
        assert worker.seconds["memory"] >= 0
    assert all(bool((values == 1).all()) for values in parameters.values())
