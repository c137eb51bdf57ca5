"""Owns CUDA devices as torch offers them, and where the vendor's software shows on a machine.

Written from documentation, not yet run on a device; knows no kernel and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.platforms.accelerator import AcceleratorRuntime, Traits
from firstlight.platforms.management import name_and_place, open_library
from firstlight.platforms.stack import Platform, VendorStack
from firstlight.platforms.torch_check import require_torch

UNTESTED = "this platform was written from documentation and has not been run on a device"
_BFLOAT16_FROM, _FLOAT8_FROM = 80, 89


def traits(module: Any, index: int) -> Traits:
    """Returns what the compute capability says of a card."""
    properties = module.get_device_properties(index)
    arch = 10 * int(properties.major) + int(properties.minor)
    has = {"float32", "float16", "float64", "int8", "int8_mm", "streams", "graphs", "pinned"}
    has |= {"event_timing", "compile", "accelerator_memory_api", "graph_collectives"}
    if arch >= _BFLOAT16_FROM:
        has.add("bfloat16")
    if arch >= _FLOAT8_FROM:
        has |= {"float8", "fp8_storage", "fp8_collective"}
    version = require_torch().version
    notes = [UNTESTED]
    if getattr(version, "hip", None):
        notes.append(f"torch is built for HIP {version.hip}: another vendor's card under this name")
    return Traits(
        arch=arch,
        cores=int(properties.multi_processor_count),
        capabilities=frozenset(has),
        undecided=frozenset({"p2p", "triton"}),
        versions=(("sdk", str(version.cuda)),) if version.cuda else (),
        notes=tuple(notes),
    )


def read_cards() -> Mapping[str, Any]:
    """Returns driver, cards and links as NVML tells them. Raises what it raises when absent."""
    nvml, driver, handles = open_library("pynvml")
    return {
        "driver": driver,
        "cards": [_card(nvml, handle) for handle in handles],
        "links": [link for i, handle in enumerate(handles) for link in _links(nvml, handle, i)],
    }


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        **name_and_place(nvml, handle),
        "arch": 10 * major + minor,
        "total": int(memory.total),
        "free": int(memory.free),
    }


def _links(nvml: Any, handle: Any, index: int) -> list[dict[str, Any]]:
    found = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:  # the card has no link of this number
            break
        found.append({"card": index, "link": link, "state": "up" if up else "down"})
    return found


STACK = VendorStack(
    name="cuda",
    vendor="NVIDIA",
    pci_vendor="0x10de",
    node_folder="/dev",
    node_prefix="nvidia",
    kernel_module="nvidia",
    peer_module="nvidia_peermem",
    container_variable="NVIDIA_VISIBLE_DEVICES",
    visible_variables=("CUDA_VISIBLE_DEVICES",),
    driver_command=("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    driver_pattern=r"^(\d[\d.]+)\s*$",
    libraries=("libcuda.so.1",),
    management="nvidia-ml-py",
    build_attribute="cuda",
    collective_backend="nccl",
    machines=("x86_64", "aarch64"),
    link_name="NVLink",
    read_cards=read_cards,
)
PLATFORM = Platform(AcceleratorRuntime(STACK, traits), STACK)
