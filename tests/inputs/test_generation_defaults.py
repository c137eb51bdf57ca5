"""What model authors recommend is read exactly, and wrong values are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.errors import ConfigError
from firstlight.inputs.generation_defaults import GenerationDefaults, read_generation_defaults


def folder(path: Path, generation: Any = None, model: Any = None) -> Path:
    for name, value in (("generation_config.json", generation), ("config.json", model)):
        if value is not None:
            (path / name).write_text(json.dumps(value))
    return path


def test_every_field_is_read_and_the_rest_listed(tmp_path: Path) -> None:
    generation = {
        "temperature": 1,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "do_sample": True,
        "max_new_tokens": 2048,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "eos_token_id": [7, 8],
        "transformers_version": "5",
        "typical_p": None,
    }
    assert read_generation_defaults(folder(tmp_path, generation)) == GenerationDefaults(
        temperature=1.0,
        top_k=20,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.05,
        do_sample=True,
        max_new_tokens=2048,
        bos_id=1,
        pad_id=2,
        eos_ids=(7, 8),
        ignored=("transformers_version", "typical_p"),
    )


def test_end_tokens_of_both_files_count_once(tmp_path: Path) -> None:
    model = {"eos_token_id": 3, "text_config": {"eos_token_id": [4, 9]}}
    found = read_generation_defaults(folder(tmp_path, {"eos_token_id": [9, 3]}, model))
    assert found.eos_ids == (9, 3, 4)


def test_missing_files_mean_no_advice(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("do_sample", 1),
        ("max_new_tokens", 0),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
    ],
)
def test_wrong_values_name_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} is"):
        read_generation_defaults(folder(tmp_path, {field: value}))


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path)
