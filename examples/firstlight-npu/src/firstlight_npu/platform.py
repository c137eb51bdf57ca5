"""Owns Ascend NPUs as a platform: torch_npu's device `npu` and where its software shows.

Written from the public documentation of torch_npu; not yet run on a device.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from firstlight.platforms.accelerator import AcceleratorRuntime, Traits
from firstlight.platforms.stack import Platform, VendorStack

UNTESTED = "written from documentation, not yet run on a device"


def traits(module: Any, index: int) -> Traits:
    """Returns what is the same for every card torch_npu runs on; the rest is left undecided.

    Cards have no architecture number: their name says what they are.
    """
    properties = module.get_device_properties(index)
    has = {"float32", "float16", "int8", "streams", "pinned", "event_timing"}
    undecided = {"float8", "graphs", "graph_collectives", "compile", "triton", "p2p", "int8_mm"}
    # Asked of the stack itself where it answers; a build that has no such call leaves it undecided.
    asked = getattr(module, "is_bf16_supported", None)
    if asked is None:
        undecided.add("bfloat16")
    elif asked():
        has.add("bfloat16")
    return Traits(
        arch=0,
        cores=int(getattr(properties, "cube_core_num", 0)),
        capabilities=frozenset(has),
        undecided=frozenset(undecided),
        versions=(("plugin", importlib.metadata.version("torch_npu")),),
        notes=(UNTESTED,),
    )


STACK = VendorStack(
    name="npu",
    vendor="Huawei",
    pci_vendor="0x19e5",
    node_folder="/dev",
    node_prefix="davinci",
    container_variable="ASCEND_VISIBLE_DEVICES",
    visible_variables=("ASCEND_RT_VISIBLE_DEVICES",),
    driver_command=("npu-smi", "info"),
    driver_pattern=r"Version:\s*(\S+)",
    libraries=("libascendcl.so", "libhccl.so"),
    plugin="torch_npu",
    collective_backend="hccl",
    backend_modules=("torch_npu",),
    machines=("x86_64", "aarch64"),
)
PLATFORM = Platform(AcceleratorRuntime(STACK, traits), STACK)
