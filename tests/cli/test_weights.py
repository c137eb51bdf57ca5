"""The verbs about weights, run through the command line on a small checkpoint."""

import json

import pytest
from safetensors.numpy import load_file

from firstlight.cli.main import main
from tiny_models import tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    write_checkpoint(folder, tiny_config("llama3"))
    return folder


@pytest.fixture(scope="module")
def store(checkpoint):
    assert main(["shard", str(checkpoint), str(checkpoint.parent / "store")]) == 0
    return checkpoint.parent / "store"


def report_of(capsys, *arguments):
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return report


def test_inspect_says_what_a_checkpoint_is(checkpoint, capsys):
    report = report_of(capsys, "inspect", checkpoint)
    assert report["ok"] and report["data"]["family"] == "llama"


def test_inspect_of_a_truncated_file_fails_and_names_it(checkpoint, tmp_path, capsys):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    report = report_of(capsys, "inspect", tmp_path)
    assert report["exit_code"] == 1 and "model.safetensors" in json.dumps(report["checks"])


def test_shard_again_finds_the_store_complete(checkpoint, store, capsys):
    report = report_of(capsys, "shard", checkpoint, store)
    assert report["ok"] and "complete" in json.dumps(report["sections"])


def test_verify_numbers_its_steps_and_fails_on_one_flipped_bit(store, tmp_path, capsys):
    copy = tmp_path / "store"
    for path in store.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(store)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(store)).write_bytes(path.read_bytes())
    assert report_of(capsys, "verify", copy)["ok"]
    damaged = copy / "units" / "layer-000.bin"
    content = bytearray(damaged.read_bytes())
    content[10] ^= 1
    damaged.write_bytes(content)
    report = report_of(capsys, "verify", copy)
    assert report["exit_code"] == 1 and "layer-000" in json.dumps(report)


def test_export_gives_the_source_back(checkpoint, store, tmp_path, capsys):
    assert report_of(capsys, "export", store, tmp_path / "out")["ok"]
    written = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    source = load_file(checkpoint / "model.safetensors")
    assert {n: t.tobytes() for n, t in written.items()} == {
        name: tensor.tobytes() for name, tensor in source.items()
    }


def test_what_is_not_there_is_bad_input(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none")]) == 3
    assert main(["shard", str(tmp_path / "none"), str(tmp_path / "store")]) == 3
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_up_refuses_bad_options_of_serve_before_any_work(checkpoint, tmp_path, capsys):
    arguments = ["up", str(checkpoint), "--store", str(tmp_path / "store"), "--", "--prot", "3"]
    assert main(arguments) == 2
    assert "No such option: --prot" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_up_stops_at_the_first_layer_that_fails(tmp_path, capsys):
    report = report_of(capsys, "up", tmp_path / "none", "--store", tmp_path / "store")
    states = {check["name"]: check["status"] for check in report["checks"]}
    assert states["inspect"] == "fail" and states["shard"] == "unknown"


def test_verify_takes_a_store_or_a_service(store, capsys):
    assert main(["verify"]) == 2 and main(["verify", str(store), "--live", "http://x"]) == 2
    assert "a store, or --live URL" in capsys.readouterr().err
    assert main(["verify", "--live", "http://127.0.0.1:9"]) == 4
    assert "check that the service runs" in capsys.readouterr().err


def test_one_rank_reads_for_all_from_a_store_only(checkpoint, capsys):
    assert main(["serve", str(checkpoint), "--load-from", "rank0", "--port", "0"]) == 2
    assert f"firstlight shard {checkpoint}" in capsys.readouterr().err
