"""What is known to go wrong when weights are loaded, and the tests that hold each kind off.

The table is checked: a test that is renamed or removed must be named here anew. Behind the dots
stands what no other file shows.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from firstlight.adapt.shard import shard
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import parameter_shapes
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import open_store
from firstlight.errors import TensorError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from tiny_checkpoints import random_tensors, tiny_config, write_checkpoint, write_weights

TESTS = Path(__file__).parents[1]
DEFECTS = {
    "page faults of mapped files over a network file system": (
        "checkpoint/test_pitfalls.py::test_no_weight_file_is_ever_mapped",
    ),
    "deadlock of loader threads": (
        "checkpoint/test_executor.py::test_the_error_of_a_job_reaches_the_caller_and_stops_the_rest",
        "checkpoint/test_executor.py::test_more_threads_run_every_job_once",
        "checkpoint/test_executor.py::test_a_read_that_never_returns_is_named_with_file_and_offset",
        "adapt/test_shard_runs.py::test_an_error_in_one_thread_ends_all_and_is_the_one_that_is_raised",
    ),
    "linear scans of a name table for every tensor": (
        "adapt/test_inspect.py::test_half_a_million_names_are_read_in_seconds",
        "checkpoint/test_pitfalls.py::test_work_grows_with_the_number_of_names_and_not_its_square",
    ),
    "every rank reading everything": (
        "checkpoint/test_load_path.py::test_a_rank_of_degree_t_reads_one_tth_and_what_is_replicated",
        "checkpoint/test_loader.py::test_a_rank_of_a_store_reads_only_its_share",
    ),
    "limits on total time that kill a slow load, while a stuck one is waited for": (
        "checkpoint/test_executor.py::test_a_load_slower_than_the_patience_is_let_finish",
        "checkpoint/test_executor.py::test_a_read_that_never_returns_is_named_with_file_and_offset",
    ),
    "no progress of a rank": (
        "checkpoint/test_loader.py::test_phases_add_up_and_progress_reaches_the_end",
        "adapt/test_shard.py::test_progress_counts_every_byte_once",
    ),
    "files shorter than their header says": (
        "checkpoint/test_reader.py::test_a_file_cut_anywhere_is_refused_by_name",
        "checkpoint/test_reader.py::test_a_file_shortened_after_opening_is_an_error_not_zeros",
        "checkpoint/test_torch_files.py::test_an_absent_or_short_chunk_file_is_named",
        "adapt/test_verify.py::test_a_truncated_unit_is_named_with_sizes",
    ),
    "missing or extra tensors passed over": (
        "checkpoint/test_names.py::test_all_differences_are_listed_at_once",
        "checkpoint/test_reader.py::test_index_and_files_are_compared_both_ways",
        "checkpoint/test_loader.py::test_parameters_that_do_not_fit_are_all_named",
    ),
    "an error without a file name": (
        "checkpoint/test_positioned_io.py::test_a_device_error_names_file_and_offset",
        "checkpoint/test_loader.py::test_a_damaged_store_is_never_loaded",
        "checkpoint/test_pitfalls.py::test_whatever_is_wrong_with_a_file_its_name_is_in_the_error",
    ),
    "headers near the limit of the format": (
        "adapt/test_inspect_defects.py::test_a_header_close_to_the_limit_is_read",
        "adapt/test_inspect_defects.py::test_a_header_over_the_limit_is_named_and_not_read",
    ),
    "two ranks loading each other's expert": (
        "checkpoint/test_kimi_weights.py::test_any_rank_of_any_legal_layout_holds_its_part",
        "checkpoint/test_layout_matrix.py::test_all_ranks_of_a_layout_put_together_are_the_source",
    ),
    "quantised tensors cut inside a group": (
        "checkpoint/test_kimi_weights.py::test_a_layout_that_cuts_a_head_or_a_scale_group_is_refused",
        "sharding/test_slices.py::test_granules_cut_neither_pieces_nor_groups",
        "adapt/test_quantise.py::test_any_layout_loads_what_the_export_holds",
    ),
    "padding longer than the config says": (
        "checkpoint/test_kimi_weights.py::test_experts_stand_expert_major_in_granules_of_one_scale_group",
        "checkpoint/test_kimi_weights.py::test_the_store_of_the_miniature_is_whole_and_comes_back_bit_for_bit",
    ),
    "scales dropped, ignored or taken as 1.0": (
        "checkpoint/test_dequantised.py::test_a_scale_that_is_absent_or_does_not_fit_is_an_error",
        "checkpoint/test_dequantised.py::test_a_published_checkpoint_loads_in_any_layout_and_through_a_store",
    ),
    "silent casts": (
        "adapt/test_export.py::test_a_cast_is_said",
        "adapt/test_shard.py::test_a_cast_is_recorded_tensor_by_tensor",
        "adapt/test_shard.py::test_a_cast_that_overflows_is_refused_by_name",
        "checkpoint/test_kimi_weights.py::test_kept_types_are_demanded_of_the_caller_and_of_the_file",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_kind_of_defect_has_tests_that_exist(defect):
    for test in DEFECTS[defect]:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), test


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pitfalls")
    write_checkpoint(folder / "hf", shards=2, vocab_size=4000)
    shard(folder / "hf", folder / "store")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system what is mapped")
@pytest.mark.parametrize("kind", ["hf", "store"])
def test_no_weight_file_is_ever_mapped(made, kind):
    source = open_checkpoint(made / kind) if kind == "hf" else open_store(made / kind)
    spec, place = read_model_spec(tiny_config(vocab_size=4000)), Layout().place(0)
    shapes, seen = parameter_shapes(spec, place), []

    def look(phase, done, total, unit):
        seen.append(Path("/proc/self/maps").read_text())

    parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_into(parameters, source, spec, place, progress=look)
    assert seen and not any(str(made) in maps for maps in seen)


def test_work_grows_with_the_number_of_names_and_not_its_square(tmp_path):
    """Counts what is compared: names that count comparisons of themselves stand in the table."""
    compared = 0

    class Name(str):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    from firstlight.checkpoint.names import match_names

    counts = []
    for layers in (4, 16):
        config = tiny_config(num_hidden_layers=layers)
        folder = tmp_path / str(layers)
        write_checkpoint(folder, num_hidden_layers=layers)
        spec, tensors = read_model_spec(config), open_checkpoint(folder).tensors
        table, compared = {Name(name): info for name, info in tensors.items()}, 0
        match_names(table, spec)
        counts.append(compared / len(table))
    assert counts[1] <= 2 * max(counts[0], 1)


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "header", "gone"])
def test_whatever_is_wrong_with_a_file_its_name_is_in_the_error(tmp_path, damage):
    write_weights(tmp_path, random_tensors(read_model_spec(tiny_config())), shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    raw = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        kinds = {"cut": raw[:-9], "empty": b"", "noise": b"\xff" * 999}
        path.write_bytes(kinds.get(damage, raw[:40] + b"}" + raw[41:]))
    with pytest.raises(TensorError, match=path.name.replace(".", r"\.")):
        open_checkpoint(tmp_path)
