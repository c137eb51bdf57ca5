"""`bench long-context`: the bundled k3-mini looks a value up in every way; what is refused, is."""

import json
from pathlib import Path

import pytest

import firstlight
from firstlight.cli.main import main

K3_MINI = Path(firstlight.__file__).parent / "data" / "k3_mini"
WAYS = "full | int8 full | fp8 full | window=64,sinks=8 | sparse=64x8"


def test_ways_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["bench", "long-context", str(K3_MINI), "--lengths", "512", "--questions", "2",
         "--ways", WAYS, "--json"]
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    rows = {row["way"]: row for row in report["data"]["rows"]}
    assert list(rows) == [way.strip() for way in WAYS.split("|")]
    for name in ("full", "int8 full", "fp8 full", "sparse=64x8"):
        assert (rows[name]["right"], rows[name]["asked"]) == (2, 2)
    # The pairs asked for lie behind a window of 64 tokens.
    assert rows["window=64,sinks=8"]["answer_nats"] > rows["full"]["answer_nats"] + 1
    assert rows["window=64,sinks=8"]["cache_bytes"] < rows["full"]["cache_bytes"]
    assert rows["full"]["seconds"] > 0
    assert rows["fp8 full"]["kv_dtype"] == "fp8"
    assert rows["fp8 full"]["cache_bytes"] == rows["int8 full"]["cache_bytes"]
    # A choice of more blocks than there are is full attention.
    assert rows["sparse=64x8"]["answer_nats"] == pytest.approx(
        rows["full"]["answer_nats"], abs=1e-4
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "12"], "at least 256"),
        (["--ways", "full | "], "names no attention"),
        (["--lengths", "512", "--ways", "0: window=8"], "layer 0 keeps a recurrent state"),
        (["--lengths", "512", "--ways", "sparse=24x4"], "not whole pages of 16"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "long-context", str(K3_MINI), *arguments]) == 2
    assert said in capsys.readouterr().err
