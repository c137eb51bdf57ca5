import json
from pathlib import Path

import pytest

from firstlight.cli.main import main
from firstlight.planning.plan_file import read_plan

DATA = Path(__file__).parent.parent / "data" / "k3"
K3 = str(DATA / "full" / "config.json")


def run(capsys, *words):
    code = main(["plan", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_kimi_k3_on_64_s5000(capsys, tmp_path):
    target, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    code, out, _ = run(
        capsys,
        *(K3, "--devices", "64xS5000@8", "--context", "1M", "--concurrency", "16"),
        *("--images", "4", "--plan-path", str(target), "--picture", str(picture), "--json"),
    )
    report = json.loads(out)
    assert code == 0 and report["ok"]
    plan = read_plan(target)
    assert plan.tp * plan.pp * plan.dp * plan.replicas == 64
    assert report["data"]["plan"]["version"] == plan.version == 1
    assert len(report["data"]["lost"]) == 5
    assert picture.read_text().startswith("<svg")


def test_what_does_not_fit_fails_with_ways_out(capsys):
    code, out, _ = run(capsys, K3, "--devices", "8xS5000", "--context", "128K")
    assert code == 1 and "short by 142 GiB on rank" in " ".join(out.split())


def test_a_rehearsal_is_part_of_the_report(capsys):
    code, out, _ = run(
        capsys,
        *(str(DATA / "checkpoint"), "--devices", "2xS5000", "--concurrency", "2", "--rehearse"),
        *("--tp", "1", "--pp", "2", "--json"),
    )
    report = json.loads(out)
    names = [check["name"] for s in report["sections"] for check in s["checks"]]
    assert code == 0 and "no tensor is missing" in names and "bytes agree" in names
    assert [load["rank"] for load in report["data"]["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ((K3,), 2, "no devices given"),
        ((K3, "--devices", "8xB300", "--context", "2M"), 2, "exceeds the model's 1048576"),
        ((K3, "--devices", "8xB300", "--emit", "slurm"), 2, "no launch settings for slurm"),
        ((K3, "--devices", "8xB300", "--tp", "7"), 3, "tp 7 does not divide"),
        (("nowhere", "--devices", "8xB300"), 3, "no such file"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(capsys, words, code, part):
    found, out, err = run(capsys, *words)
    assert found == code and out == "" and part in err and err.count("\n") == 1


def test_this_machine_can_be_planned_for(capsys):
    words = (str(DATA / "checkpoint"), "--devices", "1xcpu", "--dtype", "float32")
    code, out, _ = run(capsys, *words, "--concurrency", "1", "--context", "256", "--json")
    assert code == 0 and json.loads(out)["data"]["plan"]["fleet"] == "1xcpu@1"
