import json
import shlex
from xml.etree import ElementTree

import pytest
import yaml

from firstlight.cli.main import main
from firstlight.planning.emit import TARGETS
from firstlight.planning.hardware import parse_fleet
from firstlight.planning.kubernetes import manifest
from firstlight.planning.picture import draw
from firstlight.planning.plan_file import plan_of
from firstlight.planning.search import Question, evaluate
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout

FLEET = parse_fleet("64xS5000@8")


def planned(spec, layout, fleet=FLEET, rules=None, replicas=1):
    load = Workload(context=32768, concurrency=16)
    asked = Question(spec, fleet, load, rules or PlanRules())
    answer = evaluate(asked, layout, replicas)
    return answer, plan_of(answer, "models/Kimi K3", 1)


@pytest.fixture(scope="module")
def spread(k3):
    return planned(k3, Layout(tp=8, pp=4, dp=2, ep=16))


def options(line):
    words = shlex.split(line)
    return {w: v for w, v in zip(words, [*words[1:], ""], strict=True) if w.startswith("--")}


def test_every_target_names_the_model_once_quoted(spread):
    for name in ("firstlight", "vllm", "sglang"):
        assert "models/Kimi K3" in shlex.split(TARGETS[name](spread[1], FLEET).lines[0])


def test_degrees_in_the_words_of_vllm(spread):
    launch = TARGETS["vllm"](spread[1], FLEET)
    first, others = (options(line) for line in launch.lines)
    assert first["--tensor-parallel-size"] == "8" and first["--pipeline-parallel-size"] == "4"
    assert first["--data-parallel-size"] == "2" and "--enable-expert-parallel" in first
    assert first["--nnodes"] == "8" and first["--gpu-memory-utilization"] == "0.8"
    assert "--headless" in others and "--headless" not in first


def test_sglang_counts_data_parallel_parts_as_tensor_parallel(spread):
    found = options(TARGETS["sglang"](spread[1], FLEET).lines[0])
    assert found["--tp-size"] == "16" and found["--dp-size"] == "2" and found["--ep-size"] == "16"
    assert found["--max-running-requests"] == "16"


def test_serve_is_told_the_sequences_of_all_parts(spread):
    launch = TARGETS["firstlight"](spread[1], FLEET)
    assert options(launch.lines[0])["--max-sequences"] == "16"


def test_experts_that_vllm_would_spread_otherwise_are_a_note(k3):
    _, plan = planned(k3, Layout(tp=8, pp=4, dp=2, ep=4))
    assert TARGETS["vllm"](plan, FLEET).notes[0] == (
        "vLLM spreads experts over all 16 ranks, the plan over 4"
    )


def test_the_serve_command_is_one_that_serve_takes(dense, capsys):
    _, plan = planned_small(dense)
    words = shlex.split(TARGETS["firstlight"](plan, FLEET).lines[0])
    assert words[0] == "firstlight"
    assert main([*words[1:], "--show-settings"]) == 0
    shown = capsys.readouterr().out
    assert f"kv_budget_bytes = {plan.kv_budget_bytes}" in shown and "tp = 2 " in shown


def planned_small(spec, rules=None):
    load = Workload(context=1024, concurrency=4, input_tokens=512, output_tokens=64)
    asked = Question(spec, parse_fleet("2xS5000"), load, rules or PlanRules())
    answer = evaluate(asked, Layout(tp=2))
    return answer, plan_of(answer, "models/small", 1)


def test_what_is_read_and_where_caches_lie_goes_to_serve_and_is_a_note_for_others(dense, capsys):
    told = {"attention": "0-1: full; *: sparse=64x32", "tiers": "host=1GiB,disk=/a b:2GiB"}
    _, plan = planned_small(dense, PlanRules(block_size=64, **told))
    words = shlex.split(TARGETS["firstlight"](plan, FLEET).lines[0])
    assert main([*words[1:], "--show-settings"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} = {value}" in shown for name, value in told.items())
    for name in ("vllm", "sglang", "ray"):
        notes = " ".join(TARGETS[name](plan, FLEET).notes)
        assert f"--attention {told['attention']} and --tiers {told['tiers']}" in notes


def test_fp8_caches_have_each_engines_own_word(dense):
    _, plan = planned_small(dense, PlanRules(kv_dtype="fp8"))
    for name, flag, value in (
        ("firstlight", "--kv-dtype", "fp8"),
        ("vllm", "--kv-cache-dtype", "fp8"),
        ("sglang", "--kv-cache-dtype", "fp8_e4m3"),
    ):
        assert options(TARGETS[name](plan, FLEET).lines[0])[flag] == value


def test_torchrun_and_ray_know_machines_and_ranks(spread):
    assert options(TARGETS["torchrun"](spread[1], FLEET).lines[0])["--nproc-per-node"] == "8"
    text = TARGETS["ray"](spread[1], FLEET).text
    bundles = text.split("bundles ", 1)[1].splitlines()[0]
    assert json.loads(bundles) == [{"GPU": 8}] * 8


def test_the_manifest_is_yaml_of_a_leader_worker_set(spread):
    text = manifest(spread[1], FLEET, image="registry/engine:1")
    document = yaml.safe_load(text)
    assert document["kind"] == "LeaderWorkerSet"
    template = document["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 8 and document["metadata"]["name"] == "kimi-k3"
    leader = template["leaderTemplate"]["spec"]["containers"][0]
    worker = template["workerTemplate"]["spec"]["containers"][0]
    assert leader["resources"]["limits"] == {"mthreads.com/gpu": "8"}
    assert leader["command"] == worker["command"] and leader["command"][:2] == ["sh", "-c"]
    assert '--node-rank "$LWS_WORKER_INDEX"' in leader["command"][2]
    probe = leader["startupProbe"]
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience > sum(spread[1].times.cold_start.values())


def test_the_picture_is_svg_with_a_bar_for_each_stage(spread):
    answer, _ = spread
    root = ElementTree.fromstring(draw(answer.memory, FLEET, "K3 <on> S5000"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "K3 <on> S5000" in texts
    assert [t for t in texts if t.startswith("ranks ")] == [
        "ranks 0-15",
        "ranks 16-31",
        "ranks 32-47",
        "ranks 48-63",
    ]
