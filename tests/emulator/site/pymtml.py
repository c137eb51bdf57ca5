"""A stand-in for the vendor's management library: answers from a recorded machine, not from cards.

The record is the file EMULATED_MTML names, else the one beside this file. It offers the names of
mthreads-ml-py 2.4.3 that monitors use; like the library, it cannot start a second time.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MTML_SUCCESS = 0
MTML_ERROR_DRIVER_NOT_LOADED = 1
MTML_ERROR_NOT_SUPPORTED = 4
MTML_ERROR_UNINITIALIZED = 666
NVML_SUCCESS = MTML_SUCCESS
NVML_ERROR_NOT_SUPPORTED = MTML_ERROR_NOT_SUPPORTED
NVML_TEMPERATURE_GPU = 0
MTML_MTLINK_STATE_DOWN, MTML_MTLINK_STATE_UP, MTML_MTLINK_STATE_DOWNGRADE = 0, 1, 2
MTML_TOPOLOGY_INTERNAL, MTML_TOPOLOGY_SINGLE, MTML_TOPOLOGY_SYSTEM = 0, 1, 5
RECORD = Path(__file__).with_name("pymtml_record.json")

_state: dict[str, Any] = {"record": None, "ended": False}


class MTMLError(Exception):
    """What the library raises; `value` is its error number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"MTML error {value}")
        self.value = value


NVMLError = MTMLError


def mtmlLibraryInit() -> None:
    """Reads the record. OSError when there is no driver, as when the library is absent."""
    if _state["ended"]:
        raise MTMLError(MTML_ERROR_UNINITIALIZED)
    record = json.loads(Path(os.environ.get("EMULATED_MTML") or RECORD).read_text("utf-8"))
    if record.get("library") == "absent":
        raise OSError("libmtml.so: cannot open shared object file: No such file or directory")
    if record.get("library") == "no driver":
        raise MTMLError(MTML_ERROR_DRIVER_NOT_LOADED)
    _state["record"] = record


def mtmlLibraryShutDown() -> None:
    """Ends the library for this process."""
    _state.update(record=None, ended=True)


def mtmlLibraryGetVersion() -> str:
    return str(_record()["library_version"])


def mtmlLibraryInitSystem() -> object:
    return _record()


def mtmlSystemGetDriverVersion(system: object = None) -> str:
    return str(_record()["driver"])


def mtmlLibraryCountDevice() -> int:
    return len(_record()["cards"])


def mtmlLibraryInitDeviceByIndex(index: int) -> dict[str, Any]:
    cards: list[dict[str, Any]] = _record()["cards"]
    if not 0 <= index < len(cards):
        raise MTMLError(7)
    return cards[index]


def mtmlLibraryInitDeviceByUuid(uuid: str) -> dict[str, Any]:
    return _found("uuid", uuid)


def mtmlLibraryInitDeviceByPciSbdf(sbdf: str) -> dict[str, Any]:
    return _found("pci", sbdf)


def mtmlDeviceGetIndex(device: dict[str, Any]) -> int:
    index: int = _record()["cards"].index(device)
    return index


def mtmlDeviceGetName(device: dict[str, Any]) -> str:
    return str(device["name"])


def mtmlDeviceGetUUID(device: dict[str, Any]) -> str:
    return str(device["uuid"])


def mtmlDeviceGetPciInfo(device: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(sbdf=device["pci"], busId=device["pci"])


def mtmlDeviceGetPowerUsage(device: dict[str, Any]) -> int:
    return int(device["power_milliwatts"])


def mtmlDeviceInitMemory(device: dict[str, Any]) -> dict[str, Any]:
    return device


def mtmlDeviceInitGpu(device: dict[str, Any]) -> dict[str, Any]:
    return device


def mtmlMemoryGetTotal(memory: dict[str, Any]) -> int:
    return int(memory["total"])


def mtmlMemoryGetUsed(memory: dict[str, Any]) -> int:
    return int(memory["used"])


def mtmlGpuGetUtilization(gpu: dict[str, Any]) -> int:
    return int(gpu["utilization"])


def mtmlGpuGetTemperature(gpu: dict[str, Any]) -> int:
    return int(gpu["temperature"])


def mtmlDeviceGetMtLinkSpec(device: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        version=device["link_version"], bandWidth=device["link_bandwidth"],
        linkNum=len(device["links"]),
    )  # fmt: skip


def mtmlDeviceGetMtLinkState(device: dict[str, Any], link: int) -> int:
    return {"down": 0, "up": 1, "downgrade": 2}[device["links"][link]["state"]]


def mtmlDeviceGetMtLinkRemoteDevice(device: dict[str, Any], link: int) -> dict[str, Any]:
    return mtmlLibraryInitDeviceByIndex(device["links"][link]["to"])


def mtmlDeviceCountMtLinkLayouts(device: dict[str, Any], remote: dict[str, Any]) -> int:
    return len(_between(device, remote))


def mtmlDeviceGetMtLinkLayouts(
    device: dict[str, Any], remote: dict[str, Any], count: int
) -> list[SimpleNamespace]:
    links = _between(device, remote)[:count]
    return [SimpleNamespace(localLinkId=link, remoteLinkId=link) for link in links]


def mtmlDeviceGetTopologyLevel(device: dict[str, Any], remote: dict[str, Any]) -> int:
    if device is remote:
        return MTML_TOPOLOGY_INTERNAL
    same = device["numa"] == remote["numa"]
    return MTML_TOPOLOGY_SINGLE if same else MTML_TOPOLOGY_SYSTEM


def mtmlDeviceGetP2PStatus(device: dict[str, Any], remote: dict[str, Any], capability: int) -> int:
    return MTML_SUCCESS if _between(device, remote) else MTML_ERROR_NOT_SUPPORTED


def nvmlInit() -> None:
    mtmlLibraryInit()


def nvmlShutdown() -> None:
    mtmlLibraryShutDown()


def nvmlSystemGetDriverVersion() -> str:
    return mtmlSystemGetDriverVersion()


def nvmlDeviceGetCount() -> int:
    return mtmlLibraryCountDevice()


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    return mtmlLibraryInitDeviceByIndex(index)


def nvmlDeviceGetHandleByUuid(uuid: str) -> dict[str, Any]:
    return mtmlLibraryInitDeviceByUuid(uuid)


def nvmlDeviceGetName(device: dict[str, Any]) -> str:
    return mtmlDeviceGetName(device)


def nvmlDeviceGetUUID(device: dict[str, Any]) -> str:
    return mtmlDeviceGetUUID(device)


def nvmlDeviceGetPciInfo(device: dict[str, Any]) -> SimpleNamespace:
    return mtmlDeviceGetPciInfo(device)


def nvmlDeviceGetMemoryInfo(device: dict[str, Any]) -> SimpleNamespace:
    total, used = mtmlMemoryGetTotal(device), mtmlMemoryGetUsed(device)
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetUtilizationRates(device: dict[str, Any]) -> SimpleNamespace:
    used = 100 * mtmlMemoryGetUsed(device) // mtmlMemoryGetTotal(device)
    return SimpleNamespace(gpu=mtmlGpuGetUtilization(device), memory=used)


def nvmlDeviceGetTemperature(device: dict[str, Any], sensor: int) -> int:
    return mtmlGpuGetTemperature(device)


def nvmlSystemGetCudaDriverVersion() -> int:
    return 0


def nvmlDeviceGetComputeRunningProcesses(device: dict[str, Any]) -> list[Any]:
    raise MTMLError(MTML_ERROR_NOT_SUPPORTED)


def _record() -> dict[str, Any]:
    if _state["record"] is None:
        raise MTMLError(MTML_ERROR_UNINITIALIZED)
    record: dict[str, Any] = _state["record"]
    return record


def _found(key: str, value: str) -> dict[str, Any]:
    for card in _record()["cards"]:
        if card[key] == value:
            found: dict[str, Any] = card
            return found
    raise MTMLError(7)


def _between(device: dict[str, Any], remote: dict[str, Any]) -> list[int]:
    target = mtmlDeviceGetIndex(remote)
    return [i for i, link in enumerate(device["links"]) if link["to"] == target]
