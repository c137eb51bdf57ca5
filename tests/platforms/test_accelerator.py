"""The general runtime on a device torch knows only by name: it fails as old vendor stacks do."""

import json
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

# torch's own registration of a device without code: torch.accelerator's memory and synchronize
# calls raise the very errors of stacks that lack them, and the device module has calls of its own.
SCRIPT = """
import json, types, torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("musa")
calls = []
module = torch.musa
module.device_count = lambda: 2
module.mem_get_info = lambda index: (3 * 2**30, 4 * 2**30)
module.max_memory_reserved = lambda index: 7
module.synchronize = lambda index: calls.append(("synchronize", index))
module.set_device = lambda index: calls.append(("set_device", index))
module.get_device_name = lambda index: "MTT S4000"
properties = types.SimpleNamespace(major=2, minor=2, multi_processor_count=48)
module.get_device_properties = lambda index: properties
from firstlight.platforms.find import find_platform
platform = find_platform("musa")
spec = platform.spec(1)
platform.synchronize(1)
print(json.dumps({
    "unavailable": platform.unavailable(), "count": platform.count(), "bound": platform.bind(1, 1),
    "memory": [spec.memory.total_bytes, spec.memory.available_bytes],
    "peak": platform.peak_bytes(1), "calls": calls, "arch": spec.arch,
    "can": sorted(spec.capabilities), "quirks": sorted(spec.quirks), "text": str(spec),
}))
"""


@pytest.fixture(scope="module")
def old_stack():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_calls_torch_lacks_go_to_the_device_module(old_stack):
    assert old_stack["memory"] == [4 * 2**30, 3 * 2**30] and old_stack["peak"] == 7
    assert ["synchronize", 1] in old_stack["calls"] and old_stack["bound"] == "musa:1"


def test_an_unknown_version_has_every_workaround_that_fits_the_card(old_stack):
    assert {"module_memory_calls", "graphs_off", "compile_off"} <= set(old_stack["quirks"])
    assert old_stack["arch"] == 22 and "bfloat16" in old_stack["can"]
    assert not {"float8", "graphs", "compile"} & set(old_stack["can"])


def test_the_spec_prints_as_one_line(old_stack):
    assert old_stack["text"].startswith("musa:1 MTT S4000; arch 22; 4 GiB; collectives mccl")
    assert "\n" not in old_stack["text"]
