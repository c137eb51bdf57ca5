"""The emulated device itself: what torch is told, and the errors a card would give."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

MIB = 2**20


def message_of(work: Any, kind: type[Exception] = RuntimeError) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    return ""


def facts() -> dict[str, Any]:
    properties = torch.musa.get_device_properties(0)
    return {
        "accelerator": str(torch.accelerator.current_accelerator()),
        "count": torch.accelerator.device_count(),
        "name": properties.name,
        "capability": torch.musa.get_device_capability(),
        "dist": torch.distributed.get_default_backend_for_device("musa"),
        "looks like another": torch.cuda.is_available(),
        "bf16": torch.musa.is_bf16_supported(),
        "sdk": torch.version.musa,
    }


def test_torch_finds_it_as_it_finds_the_vendors(emulated: Any) -> None:
    found = emulated().run(facts)[0]
    assert found["accelerator"] == "musa" and found["count"] == 2
    assert found["capability"] == (3, 1) and "S5000" in found["name"]
    assert found["dist"] == "mccl" and found["bf16"] and found["sdk"]
    assert not found["looks like another"]


def mixed_devices() -> list[str]:
    here, there, host = (torch.ones(2, device=d) for d in ("musa:0", "musa:1", "cpu"))
    return [
        message_of(lambda: here + there),
        message_of(lambda: here + host),
        message_of(lambda: torch.cat([here, host])),
        message_of(lambda: here.index_select(0, torch.tensor([1]))),
        message_of(lambda: here.numpy(), TypeError),
        message_of(lambda: torch.accelerator.set_device_index(7)),
    ]


def test_tensors_of_different_devices_do_not_mix(emulated: Any) -> None:
    *mixed, host_array, ordinal = emulated().run(mixed_devices)[0]
    assert all("on the same device" in text for text in mixed), mixed
    assert "can't convert musa:0" in host_array and "invalid device ordinal" in ordinal


def memory_walk() -> dict[str, Any]:
    from musa_emulator import control

    torch.musa.empty_cache()
    torch.musa.reset_peak_memory_stats()
    before = torch.musa.memory_allocated()
    free, total = torch.musa.mem_get_info()
    held = torch.empty(4 * MIB, dtype=torch.uint8, device="musa")
    control.set_memory_limit(16 * MIB)
    text = message_of(
        lambda: torch.empty(16 * MIB, dtype=torch.uint8, device="musa"), torch.OutOfMemoryError
    )
    fits = torch.empty(4 * MIB, dtype=torch.uint8, device="musa").numel()
    control.set_memory_limit(total)
    low, other = torch.musa.mem_get_info()[0], torch.musa.memory_allocated(1)
    neutral = torch.accelerator.memory_allocated() == torch.musa.memory_allocated()
    del held
    after, reserved = torch.musa.memory_allocated(), torch.musa.memory_reserved()
    torch.musa.empty_cache()
    return {
        "error": text,
        "fits": fits,
        "fell": free - low,
        "other": other,
        "neutral": neutral,
        "left": after - before,
        "kept": reserved - torch.musa.memory_reserved(),
        "peak": torch.musa.max_memory_allocated() - before,
    }


def test_memory_has_a_limit_and_statistics(emulated: Any) -> None:
    found = emulated().run(memory_walk)[0]
    assert "out of memory" in found["error"] and "16.00 MiB" in found["error"]
    assert found["fits"] == 4 * MIB and found["neutral"] and found["other"] == 0
    assert found["fell"] >= 4 * MIB and found["left"] == 0
    assert found["kept"] >= 4 * MIB and found["peak"] == 8 * MIB


def fresh_memory() -> tuple[bool, bool]:
    values = torch.empty(1000, device="musa").cpu()
    return bool(values.isnan().all()), torch.ones(3).pin_memory().is_pinned()


def test_memory_never_written_reads_as_nan(emulated: Any) -> None:
    assert emulated().run(fresh_memory)[0] == (True, True)


def old_stack_calls() -> list[Any]:
    x = torch.ones(1024, device="musa")
    torch.musa.synchronize()
    return [
        message_of(lambda: torch.accelerator.memory_allocated()),
        message_of(lambda: torch.accelerator.synchronize()),
        torch.musa.memory_allocated() >= x.nbytes,
        float(x.sum()),
    ]


@pytest.mark.slow
def test_an_old_stack_lacks_the_neutral_calls_and_has_its_own(emulated: Any) -> None:
    memory, waiting, *own = emulated(EMULATED_MUSA_STACK="old").run(old_stack_calls)[0]
    assert "is not a DeviceAllocator" in memory
    assert "doesn't support synchronizing all streams" in waiting
    assert own == [True, 1024.0]


@pytest.mark.slow
@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1,0", 2), ("", 0)])
def test_hidden_devices_are_not_there(
    emulated_variables: dict[str, str], visible: str, count: int
) -> None:
    code = "import torch; print(torch.musa.device_count(), torch.musa.is_available())"
    environment = {**os.environ, **emulated_variables, "MUSA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(count), str(count > 0)]
