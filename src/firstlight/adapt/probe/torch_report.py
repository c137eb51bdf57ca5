"""Owns the question what torch says of itself, of a vendor's plug-in and of the devices it sees."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.platforms.find import named
from firstlight.platforms.stack import Platform, VendorStack
from firstlight.platforms.torch_check import require_torch


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Returns versions, build, architectures, devices and where the collectives come from."""
    platform = named(words[0])
    try:
        torch = require_torch()
    except FirstlightError as problem:
        return {"error": str(problem)}
    plugin, plugin_error = _plugin(platform.stack)
    report: dict[str, Any] = {
        "error": "",
        "version": str(torch.__version__),
        "plugin": plugin,
        "plugin_error": plugin_error,
        "build": getattr(torch.version, platform.stack.build_attribute or "-", None),
        "backend_origin": _backend_origin(torch, platform.stack.collective_backend),
    }
    return report | _devices(torch, platform)


def _plugin(stack: VendorStack) -> tuple[str, str]:
    if not stack.plugin:
        return "", ""
    try:
        module = importlib.import_module(stack.plugin)
    except Exception as error:  # the loader's words are what is asked for
        return "", str(error).strip().splitlines()[0] if str(error) else type(error).__name__
    return str(getattr(module, "__version__", "")), ""


def _devices(torch: Any, platform: Platform) -> dict[str, Any]:
    runtime = platform.runtime
    module = getattr(torch, platform.name, None)
    archs = [_number(name) for name in getattr(module, "get_arch_list", list)()]
    specs = [runtime.spec(index) for index in range(runtime.count())]
    devices = [
        {
            "name": spec.name,
            "arch": spec.arch,
            "total": spec.memory.total_bytes,
            "free": spec.memory.available_bytes,
            "text": str(spec),
        }
        for spec in specs
    ]
    return {"archs": [arch for arch in archs if arch], "devices": devices}


def _number(name: object) -> int:
    """`sm_90a` and `mp_31` are architectures 90 and 31; virtual ones (`compute_90`) are none."""
    text = str(name)
    digits = "".join(c for c in text.rpartition("_")[2] if c.isdigit())
    return int(digits) if digits and not text.startswith("compute") else 0


def _backend_origin(torch: Any, backend: str) -> str:
    """Returns the module whose code makes the backend's groups, empty when there is none."""
    distributed = torch.distributed
    if not distributed.is_available():
        return ""
    plugin = distributed.Backend._plugins.get(backend.upper())
    if plugin is not None:
        return str(getattr(plugin.creator_fn, "__module__", "") or type(plugin).__module__)
    asked = getattr(distributed, f"is_{backend}_available", None)
    return "torch" if asked is not None and asked() else ""
