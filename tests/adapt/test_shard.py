"""A checkpoint becomes one store, whole or not at all, the same bytes however often killed."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from firstlight.adapt.shard import ShardOptions, plan_shard, shard
from firstlight.assembly.source import open_source
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import open_store, read_manifest
from firstlight.errors import (
    BadInput,
    ConfigError,
    EnvironmentProblem,
    StoreError,
    TensorError,
    UsageError,
)
from firstlight.runner.model_path import read_spec
from tiny_checkpoints import FAMILIES, contents, tiny_config, write_checkpoint, write_weights


class Recorder:
    """A hook that keeps what it sees."""

    def __init__(self) -> None:
        self.units: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def on_unit(self, unit, tensors) -> None:
        self.units.append(unit)
        self.tensors.update({name: tensor.clone() for name, tensor in tensors.items()})

    def finish(self, store: Path) -> None:
        (store / "answers").mkdir(exist_ok=True)
        (store / "answers" / "known.json").write_text(json.dumps(self.units))


def test_a_store_holds_what_it_says_and_no_more(tmp_path):
    tensors = write_checkpoint(tmp_path / "hf", shards=2)
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    (tmp_path / "hf/README.md").write_text("---\nlicense: apache-2.0\n---\nA model.")
    (tmp_path / "hf/secret.py").write_text("print()")
    report = shard(tmp_path / "hf", tmp_path / "store")
    manifest = open_store(tmp_path / "store").manifest
    assert manifest == report.manifest
    assert manifest.licence == "apache-2.0"
    assert set(manifest.files) == {"config.json", "tokenizer.json"}
    assert manifest.coverage.tensors == len(tensors)
    assert manifest.coverage.values == sum(t.numel() for t in tensors.values())
    assert manifest.coverage.payload_bytes == sum(t.nbytes for t in tensors.values())
    names = {u.name for u in manifest.units}
    assert set(contents(tmp_path / "store")) == {
        "manifest.json", "COMPLETE", "model/config.json", "model/tokenizer.json",
        *(f"units/{n}.{kind}" for n in names for kind in ("bin", "idx")),
    }  # fmt: skip


def test_the_source_is_left_as_it_was(tmp_path):
    write_checkpoint(tmp_path / "hf")
    before = contents(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store")
    assert contents(tmp_path / "hf") == before


def test_two_conversions_give_the_same_bytes(tmp_path):
    write_checkpoint(tmp_path / "hf", "llama-bias")
    for name in ("one", "two"):
        shard(tmp_path / "hf", tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_finished_store_is_recognised(tmp_path):
    write_checkpoint(tmp_path / "hf")
    first = shard(tmp_path / "hf", tmp_path / "store")
    again = shard(tmp_path / "hf", tmp_path / "store")
    assert again.already_complete and again.manifest == first.manifest


def test_another_source_or_dtype_is_not_mixed_in(tmp_path):
    write_checkpoint(tmp_path / "hf")
    write_checkpoint(tmp_path / "other", "qwen3")
    shard(tmp_path / "hf", tmp_path / "store")
    for source, dtype in (("hf", "bf16"), ("other", "keep")):
        with pytest.raises(StoreError, match="already holds a store"):
            shard(tmp_path / source, tmp_path / "store", ShardOptions(dtype=dtype))


def test_a_begun_store_of_other_options_is_refused(tmp_path):
    write_checkpoint(tmp_path / "hf")
    stop_after(tmp_path, units=1)
    with pytest.raises(StoreError, match="begun from another source or with other options"):
        shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype="bf16"))


def test_a_directory_of_something_else_is_refused(tmp_path):
    write_checkpoint(tmp_path / "hf")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/letter.txt").write_text("mine")
    with pytest.raises(StoreError, match="neither empty nor a store"):
        shard(tmp_path / "hf", tmp_path / "store")
    with pytest.raises(UsageError, match="different places"):
        shard(tmp_path / "hf", tmp_path / "hf")


def stop_after(tmp_path: Path, units: int) -> None:
    """Leaves a store with so many finished units: the hook fails on the next one."""

    class Fails(Recorder):
        def on_unit(self, unit, tensors):
            super().on_unit(unit, tensors)
            if len(self.units) > units:
                raise RuntimeError("stopped here")

    with pytest.raises(RuntimeError, match="stopped here"):
        shard(tmp_path / "hf", tmp_path / "store", ShardOptions(hook=Fails()))


@pytest.mark.parametrize("units", [0, 1, 3])
def test_a_resumed_run_gives_the_same_bytes_and_keeps_finished_units(tmp_path, units):
    write_checkpoint(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "whole")
    stop_after(tmp_path, units)
    with pytest.raises(StoreError, match="unfinished store"):
        read_manifest(tmp_path / "store")
    done = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "store/units").glob("*.bin")}
    report = shard(tmp_path / "hf", tmp_path / "store")
    assert report.resumed_units == units == len(done)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    for name, time_ns in done.items():
        assert (tmp_path / "store/units" / name).stat().st_mtime_ns == time_ns


def test_serving_an_unfinished_store_says_how_to_finish_it(tmp_path):
    write_checkpoint(tmp_path / "hf")
    stop_after(tmp_path, units=1)
    words = r"unfinished store; run `firstlight shard SOURCE .*store` again"
    for read in (read_spec, open_source, read_manifest):
        with pytest.raises(StoreError, match=words):
            read(tmp_path / "store")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hook_sees_every_unit_in_order_with_whole_tensors(tmp_path, family):
    tensors = write_checkpoint(tmp_path / "hf", family)
    hook = Recorder()
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(hook=hook))
    assert hook.units == ["embed", "layer-000", "layer-001", "head"]
    spec = plan_shard(open_checkpoint(tmp_path / "hf")).spec
    assert set(hook.tensors) == {rule.name for rule in spec.tensors}
    assert all(torch.equal(hook.tensors[r.name], tensors[r.source]) for r in spec.tensors)


def test_the_hook_sees_finished_units_again_and_its_answers_are_recorded(tmp_path):
    write_checkpoint(tmp_path / "hf")
    stop_after(tmp_path, units=2)
    hook = Recorder()
    report = shard(tmp_path / "hf", tmp_path / "store", ShardOptions(hook=hook))
    assert hook.units == ["embed", "layer-000", "layer-001", "head"]
    assert set(report.manifest.answers) == {"known.json"}


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_a_cast_is_recorded_tensor_by_tensor(tmp_path, dtype, kind):
    write_checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    manifest = shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype=dtype)).manifest
    parts = [p for u in manifest.units for b in u.blocks for p in b.parts]
    assert {(p.source_dtype, p.dtype, p.codec) for p in parts} == {("BF16", kind, dtype)}


def test_a_cast_that_overflows_is_refused_by_name(tmp_path):
    tensors = write_checkpoint(tmp_path / "hf")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e6
    write_weights(tmp_path / "hf", tensors)
    with pytest.raises(TensorError, match=r"layers\.1\.mlp\.up_proj.*1e\+06 do not fit F16"):
        shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype="fp16"))


def test_progress_counts_every_byte_once(tmp_path):
    tensors = write_checkpoint(tmp_path / "hf")
    seen = []
    options = ShardOptions(progress=lambda *report: seen.append(report))
    shard(tmp_path / "hf", tmp_path / "store", options)
    total = sum(t.nbytes for t in tensors.values())
    assert seen[-1][:3] == ("shard", total, total)
    assert [done for _, done, _, _ in seen] == sorted(done for _, done, _, _ in seen)


def damage_truncate(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_config(folder):
    config = {**tiny_config(), "frobnicate": 3}
    (folder / "config.json").write_text(json.dumps(config))


def damage_no_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (damage_truncate, TensorError, "truncated"),
        (damage_config, ConfigError, "frobnicate = 3"),
        (damage_no_config, ConfigError, "config.json"),
    ],
)
def test_a_broken_source_leaves_no_store_behind(tmp_path, damage, kind, words):
    write_checkpoint(tmp_path / "hf", shards=2)
    damage(tmp_path / "hf")
    with pytest.raises(kind, match=words):
        shard(tmp_path / "hf", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_unknown_dtype_lists_the_known_ones(tmp_path):
    write_checkpoint(tmp_path / "hf")
    with pytest.raises(BadInput, match="keep"):
        shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype="int2"))


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_too_small_is_refused_before_writing_with_numbers(tmp_path, small_disk):
    write_checkpoint(tmp_path / "hf", vocab_size=60_000)
    with pytest.raises(EnvironmentProblem, match=r"needs 7\.\d+ MiB more, .* MiB are free there"):
        shard(tmp_path / "hf", small_disk / "store")
    assert not list((small_disk / "store/units").iterdir())


def test_a_disk_that_fills_up_meanwhile_loses_no_finished_unit(tmp_path, small_disk):
    write_checkpoint(tmp_path / "hf", vocab_size=8000, num_hidden_layers=4)
    hog = small_disk / "hog"

    def fill(phase, done, total, unit):
        if unit == "layer-002" and not hog.exists():
            with hog.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))

    with pytest.raises(EnvironmentProblem, match=r"no room to .*finished units are kept"):
        shard(tmp_path / "hf", small_disk / "store", ShardOptions(progress=fill, threads=1))
    hog.unlink()
    report = shard(tmp_path / "hf", small_disk / "store")
    assert report.resumed_units >= 2
    shard(tmp_path / "hf", tmp_path / "whole")
    assert contents(small_disk / "store") == contents(tmp_path / "whole")


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from firstlight.adapt.shard import shard
from firstlight.errors import EnvironmentProblem
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    shard(Path(sys.argv[1]), Path(sys.argv[2]))
except EnvironmentProblem as error:
    print(error)
"""


def test_a_write_the_system_refuses_names_file_and_bytes(tmp_path):
    write_checkpoint(tmp_path / "hf", vocab_size=8000)
    result = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT, tmp_path / "hf", tmp_path / "store"],
        capture_output=True, text=True, check=True, env={**os.environ},
    )  # fmt: skip
    assert "embed.bin.partial: no room to reserve 500 KiB" in result.stdout
    assert not list((tmp_path / "store/units").iterdir())


def test_a_gguf_source_becomes_a_store_with_config_and_tokenizer(tmp_path, smollm2_gguf):
    def export(source, folder):
        (folder / "tokenizer.json").write_text(json.dumps({"from": source.name}))

    with pytest.raises(UsageError, match="tokenizer exporter"):
        shard(smollm2_gguf, tmp_path / "refused")
    options = ShardOptions(dtype="bf16", export_tokenizer=export)
    manifest = shard(smollm2_gguf, tmp_path / "store", options).manifest
    assert {"config.json", "generation_config.json", "tokenizer.json"} == set(manifest.files)
    assert manifest.source.stored == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
    assert manifest.licence == "apache-2.0"
    assert manifest.coverage.values == 134_515_008
