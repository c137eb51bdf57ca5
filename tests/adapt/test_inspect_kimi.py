"""Inspect counts a Kimi model's parts, from headers or from config and index alone."""

import gzip
import json
import shutil

import pytest

from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.shard import shard
from firstlight.errors import BadInput
from tiny_kimi import K3_DATA, MINIATURE

INDEX = "model.safetensors.index.json"


@pytest.fixture
def bare(tmp_path):
    """A folder with config and index of the miniature, and none of its weight files."""
    for name in ("config.json", INDEX):
        shutil.copyfile(MINIATURE / name, tmp_path / name)
    return tmp_path


def changed_index(folder, change):
    fields = json.loads((folder / INDEX).read_text())
    change(fields)
    (folder / INDEX).write_text(json.dumps(fields))


def test_the_published_model_is_counted_from_config_and_index_alone():
    report = inspect_path(K3_DATA / "real")
    assert report.sound and report.computed
    assert report.parameters_by_part == {
        "routed experts": 2_722_740_830_208,
        "KDA attention": 30_618_088_704,
        "shared experts": 12_155_092_992,
        "MLA attention": 5_572_706_304,
        "latent projections": 4_727_310_336,
        "embed": 1_174_405_120,
        "head": 1_174_405_120,
        "dense feed-forward": 726_663_168,
        "routers": 590_955_008,
        "vision": 401_214_464,
        "projector": 46_144_512,
        "attention residuals": 2_680_832,
        "norms": 1_340_416,
    }
    assert report.parameters == 2_779_931_837_184
    assert (report.num_tensors, report.num_files) == (497_220, 96)
    assert report.num_bytes == 1_560_860_324_864
    assert report.tensors_by_dtype == {"U8": 494_592, "BF16": 2_122, "F32": 506}
    assert report.tensors_per_layer == {23: 1, 5398: 24, 5404: 68}
    assert report.quantisation == "compressed-tensors, mxfp4-pack-quantized"
    assert report.legal_tp[:7] == (1, 2, 3, 4, 6, 8, 12)
    text = [finding.what for finding in report.findings]
    assert "none of the 96 files" in text[0] and "computed from the config" in text[0]
    assert len(text) == 2 and "states no licence" in text[1]


def test_an_index_alone_says_what_the_headers_say(bare):
    from_index, from_headers = inspect_path(bare), inspect_path(MINIATURE)
    assert from_index.computed and not from_headers.computed and from_headers.sound
    for name in (
        "parameters_by_part", "bytes_by_dtype", "tensors_by_dtype", "num_tensors", "num_files",
        "num_bytes", "tensors_per_layer", "legal_tp", "quantisation",
    ):  # fmt: skip
        assert getattr(from_index, name) == getattr(from_headers, name), name


def test_a_store_is_described_like_its_source(tmp_path):
    shard(MINIATURE, tmp_path)
    source, store = inspect_path(MINIATURE), inspect_path(tmp_path)
    assert store.format == "store" and store.sound
    for name in (
        "parameters_by_part", "bytes_by_dtype", "tensors_by_dtype", "num_tensors", "quantisation",
        "tensors_per_layer", "legal_tp", "context_length",
    ):  # fmt: skip
        assert getattr(store, name) == getattr(source, name), name


def test_names_and_sizes_of_an_index_are_judged(bare):
    def change(fields):
        file = fields["weight_map"].pop("language_model.model.norm.weight")
        fields["weight_map"]["language_model.model.extra.weight"] = file
        fields["metadata"]["total_size"] = 7

    changed_index(bare, change)
    report = inspect_path(bare / INDEX)
    lines = {finding.severity: finding.line() for finding in report.findings}
    errors = [finding.line() for finding in report.findings if finding.severity == "error"]
    assert not report.sound and len(errors) == 2
    assert "language_model.model.norm.weight: missing" in errors[0]
    assert "language_model.model.extra.weight: unexpected" in errors[1]
    assert "total_size says 7 bytes" in lines["warning"]


def test_one_file_present_and_headers_are_read_again(bare):
    first = sorted(MINIATURE.glob("*.safetensors"))[0]
    shutil.copyfile(first, bare / first.name)
    report = inspect_path(bare)
    assert not report.computed and not report.sound
    assert sum("it is absent" in finding.what for finding in report.findings) == 11


# The header of packed bytes holds the time of packing, and names of tests must not change with it.
@pytest.mark.parametrize(
    "damage", [b"", b"not gzip", gzip.compress(b"{", mtime=0)], ids=["empty", "text", "cut"]
)
def test_a_damaged_packed_index_is_named(bare, damage):
    (bare / INDEX).unlink()
    (bare / f"{INDEX}.gz").write_bytes(damage)
    with pytest.raises(BadInput, match=r"index\.json\.gz"):
        inspect_path(bare)


def test_without_a_config_an_index_says_only_names(bare):
    (bare / "config.json").unlink()
    report = inspect_path(bare)
    assert not report.sound and report.num_tensors == 834 and report.num_bytes == 0
    assert any("config.json" in finding.what for finding in report.findings)
