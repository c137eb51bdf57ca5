"""`inspect --layout` shows each rank's share of the published bytes and proves that it is whole."""

import json

import pytest

from firstlight.cli.main import main
from tiny_kimi import K3_DATA, MINIATURE


def test_ranks_of_the_published_model_from_its_index_alone(capsys):
    assert main(["inspect", str(K3_DATA / "real"), "--layout", "tp=8,ep=8", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["data"]["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(8))
    once = sum(rank["num_bytes"] - rank["shared_bytes"] for rank in ranks)
    assert once + ranks[0]["shared_bytes"] + 8_832 == 1_560_860_324_864  # tails of A_log: unused


def test_a_table_is_shown(capsys):
    assert main(["inspect", str(MINIATURE), "--layout", "pp=3"]) == 0
    text = capsys.readouterr().out
    assert "what each rank takes" in text and "every byte is taken" in text


@pytest.mark.parametrize(
    ("layout", "code", "words"),
    [("tp:2", 2, "is not like tp=8"), ("tp=two", 2, "is not like"), ("tp=7", 3, "legal tp")],
)
def test_layouts_that_cannot_be_are_refused(capsys, layout, code, words):
    assert main(["inspect", str(MINIATURE), "--layout", layout]) == code
    assert words in capsys.readouterr().err
