"""Every kernel against its reference, what models use, and a wrong one that must be found."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firstlight.adapt.probe.kernel_cases import MAKERS, inputs_of, mapped, tensors_in
from firstlight.adapt.probe.kernel_coverage import judge_all
from firstlight.adapt.probe.model_operations import operations_of
from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.kernels.registry import OPERATIONS, PACKED, Kernel, KernelRegistry
from firstlight.models.spec import read_model_spec
from tiny_kimi import linear_config, miniature_config
from tiny_models import tiny_config

DTYPES = ("float32", "bfloat16", "float16")


def states(registry, dtype):
    verdicts = judge_all(registry, machine_query(dtype=dtype), "cpu")
    return {(v.operation, v.kernel): v for v in verdicts}


def test_every_operation_has_inputs_and_they_are_the_same_each_time():
    assert set(MAKERS) >= set(OPERATIONS), "an operation of the registry has no known inputs"
    for operation in OPERATIONS:
        twice = [tensors_in(list(inputs_of(operation, torch.float32))) for _ in range(2)]
        assert all(map(torch.equal, *twice)) and len(twice[0]) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_entry_of_the_registry_has_a_verdict_and_none_is_wrong(dtype):
    registry = builtin_kernels()
    found = states(registry, dtype)
    assert set(found) == {(kernel.operation, kernel.name) for kernel in registry.kernels}
    assert [v for v in found.values() if v.state == "wrong"] == []
    references = {op: v.state for (op, name), v in found.items() if name == "reference"}
    expected = {op: "missing" if op in PACKED and dtype != "float32" else "reference"
                for op in OPERATIONS}  # fmt: skip
    assert references == expected


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_planted_wrong_kernel_is_found(operation):
    """The first number of the first result, off by a part in ten thousand, or by one."""
    good = next(k for k in builtin_kernels().of(operation) if k.name == "reference")

    def wrong(*inputs):
        out = good.function(*inputs)
        first = [True]

        def spoil(tensor):
            if not first[0]:
                return tensor
            first[0] = False
            spoilt = tensor.clone()
            flat = spoilt.view(-1)
            step = 1 if not spoilt.is_floating_point() else spoilt.abs().max() * 1e-4
            flat[0] += step
            return spoilt

        return mapped(spoil, out)

    planted = Kernel(operation, "planted", wrong)
    verdict = states(KernelRegistry((planted,)), "float32")[operation, "planted"]
    assert verdict.state == "wrong" and "off by" in verdict.detail


def test_state_that_was_not_written_is_found():
    good = next(k for k in builtin_kernels().of("paged_attention") if k.name == "reference")

    def forgetful(*inputs):
        return good.function(*mapped(torch.clone, inputs))

    registry = KernelRegistry((dataclasses.replace(good, name="forgetful", function=forgetful),))
    assert states(registry, "float32")["paged_attention", "forgetful"].state == "wrong"


@pytest.mark.parametrize("fault", [NotImplementedError("no kernel image"), RuntimeError("denied")])
def test_an_operation_that_a_device_denies_is_missing_with_its_words(fault):
    def denied(*inputs):
        raise fault

    registry = KernelRegistry((Kernel("linear", "denied", denied),))
    verdict = states(registry, "float32")["linear", "denied"]
    assert (verdict.state, verdict.detail) == ("missing", str(fault))


def test_what_models_call_text_and_image_apart():
    text, image = operations_of(read_model_spec(tiny_config("llama3")))
    assert {"rotary_paged_attention", "gated_mlp_in", "add_rms_norm", "linear", "greedy"} <= text
    assert image == set() and "delta_rule" not in text
    text, image = operations_of(read_model_spec(miniature_config()))
    assert {"delta_rule", "short_conv", "latent_attention", "experts_mxfp4", "residual_mix"} <= text
    assert "rms_norm" in image and not {"delta_rule", "experts_mxfp4", "greedy"} & image
    text, _ = operations_of(read_model_spec(linear_config()))
    assert "experts" in text and "residual_mix" not in text


SITE = Path(__file__).parents[1] / "emulator"


def ask_emulated(*words, **variables):
    """Asks in a process where the emulated device is found as the vendor's plug-in would be."""
    import json

    paths = os.pathsep.join([str(SITE / "site"), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, "-m", "firstlight.adapt.probe.ask", *words],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def emulator():
    done = subprocess.run([sys.executable, str(SITE / "build.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_coverage_on_the_emulated_device(emulator):
    rows = ask_emulated("kernels", "musa", "bfloat16")["verdicts"]
    by_state = {state: {op for op, _, s, _ in rows if s == state} for _, _, state, _ in rows}
    assert by_state["reference"] == set(OPERATIONS) - set(PACKED)
    assert set(by_state) == {"reference", "missing"}


@pytest.mark.slow
def test_operators_an_architecture_denies_are_missing_not_wrong(emulator):
    rows = ask_emulated("kernels", "musa", "bfloat16", EMULATED_MUSA_ARCH="21")["verdicts"]
    references = {op: (state, words) for op, name, state, words in rows if name == "reference"}
    assert references["linear"][0] == "missing" and "BFloat16" in references["linear"][1]
    assert {state for state, _ in references.values()} <= {"missing", "reference"}
    rows = ask_emulated("kernels", "musa", "float32", EMULATED_MUSA_ARCH="21")["verdicts"]
    assert {s for op, name, s, _ in rows if name == "reference" and op not in PACKED} == {
        "reference"
    }


@pytest.mark.slow
def test_silent_garbage_of_the_emulated_device_is_found(emulator):
    answers = ask_emulated("answers", "musa")["answers"]
    found = {one["name"]: one["state"] for one in answers}
    assert found["product with out_dtype on musa:0"] == "avoided"
    assert found["float8 product on musa:0"] == found["graph"] == found["copy 0-1"] == "right"
    assert set(found.values()) == {"right", "avoided"}
