"""Owns Moore Threads cards: torch_musa's device `musa` and where its software shows on a machine.

Written from published facts and run on an emulated device only; knows no kernel and no model.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any

from firstlight.platforms.accelerator import AcceleratorRuntime, Traits
from firstlight.platforms.management import name_and_place, open_library
from firstlight.platforms.stack import Platform, VendorStack
from firstlight.platforms.versions import local_part, release

UNTESTED = "written from published facts; run on an emulated device, never on a card"
# Below the driver's 2,040 or so, because libraries hold some of their own.
MAX_LIVE_GRAPHS = 1900
_FP8_FROM, _BFLOAT16_FROM = 31, 22
_MEMORY_CALLS_FROM = "2.11.0.post2"


def traits(module: Any, index: int) -> Traits:
    """Returns what the architecture and the plug-in's version say of a card."""
    properties = module.get_device_properties(index)
    arch = 10 * int(properties.major) + int(properties.minor)
    plugin = _plugin_version()
    has = {"float32", "float16", "int8", "streams", "pinned", "event_timing"}
    if arch >= _BFLOAT16_FROM:
        has |= {"bfloat16", "p2p"}
    if arch >= _FP8_FROM:
        has |= {"float8", "fp8_storage", "fp8_collective", "graphs", "triton"}
    if release(plugin) >= release(_MEMORY_CALLS_FROM):
        has |= {"accelerator_memory_api"} | ({"compile"} if arch >= _FP8_FROM else set())
    versions = (("plugin", plugin),) if plugin else ()
    sdk = local_part(plugin, "musa")
    return Traits(
        arch=arch,
        cores=int(properties.multi_processor_count),
        capabilities=frozenset(has),
        undecided=frozenset({"int8_mm", "graph_collectives"}),
        max_live_graphs=MAX_LIVE_GRAPHS if arch >= _FP8_FROM else None,
        versions=(*versions, *((("sdk", sdk),) if sdk else ())),
        notes=(UNTESTED,),
    )


def _plugin_version() -> str:
    loaded = getattr(sys.modules.get("torch_musa"), "__version__", None)
    if loaded:
        return str(loaded)
    try:
        return importlib.metadata.version("torch_musa")
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_cards() -> Mapping[str, Any]:
    """Returns driver, cards and links as pymtml tells them. Call once a process: it cannot start
    again after it was shut down. Raises what the library raises when it is absent.
    """
    mtml, driver, handles = open_library("pymtml")
    return {
        "driver": driver,
        "cards": (cards := [_card(mtml, handle) for handle in handles]),
        "links": [
            link
            for h, card in zip(handles, cards, strict=True)
            for link in _links(mtml, h, card, cards)
        ],
    }


def _card(mtml: Any, handle: Any) -> dict[str, Any]:
    memory = mtml.nvmlDeviceGetMemoryInfo(handle)
    return {
        **name_and_place(mtml, handle),
        "total": int(memory.total),
        "free": int(memory.total) - int(memory.used),
    }


def _links(mtml: Any, handle: Any, card: Any, cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    states = {0: "down", 1: "up", 2: "downgrade"}
    places = {other["pci"]: index for index, other in enumerate(cards)}
    found = []
    for link in range(int(mtml.mtmlDeviceGetMtLinkSpec(handle).linkNum)):
        state = states.get(int(mtml.mtmlDeviceGetMtLinkState(handle, link)), "unknown")
        try:
            remote = mtml.mtmlDeviceGetMtLinkRemoteDevice(handle, link)
            target = places.get(_card(mtml, remote)["pci"])
        except mtml.NVMLError:  # in containers the far end is often not told
            target = None
        found.append({"card": places[card["pci"]], "link": link, "to": target, "state": state})
    return found


STACK = VendorStack(
    name="musa",
    vendor="Moore Threads",
    pci_vendor="0x1ed5",
    node_folder="/dev/dri",
    node_prefix="renderD",
    node_group="render",
    kernel_module="mtgpu",
    peer_module="mthreads_peermem",
    container_variable="MTHREADS_VISIBLE_DEVICES",
    visible_variables=("MUSA_VISIBLE_DEVICES",),
    driver_command=("mthreads-gmi", "-q"),
    driver_pattern=r"Driver Version\s*:\s*(\S+)",
    sdk_command=("musa_version_query",),
    sdk_pattern=r"musa_toolkits[^}]*?\"version\"\s*:\s*\"([\d.]+)",
    libraries=("libmusart.so", "libmudnn.so", "libmublas.so", "libmccl.so"),
    management="mthreads-ml-py",
    plugin="torch_musa",
    build_attribute="musa",
    collective_backend="mccl",
    backend_modules=("torch_musa",),
    foreign={"mccl": "it registers collectives of the same name for another vendor's devices"},
    pythons=("3.10",),
    link_name="MTLink",
    read_cards=read_cards,
)
PLATFORM = Platform(AcceleratorRuntime(STACK, traits), STACK)
