"""Owns `torch.musa`: devices, streams, memory and graphs under the vendor's names.

Knows the emulated device by its compiled module alone.
"""

from typing import Any, NamedTuple

import torch
from musa_emulator import native_file

from torch_musa.graphs import (
    MUSAGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
)

__all__ = ["MUSAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"]

_native = native_file.load(torch.__version__)
NAMES = {21: "MTT S80", 22: "MTT S4000", 31: "MTT S5000"}
CORES = {21: 32, 22: 48, 31: 56}
Device = Any  # an index, a torch.device or None


class DeviceProperties(NamedTuple):
    """What the vendor's properties say of a device."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


def arch() -> int:
    """Returns the architecture number that is emulated: 21, 22 or 31."""
    return int(_native.arch())


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def device_count() -> int:
    """Number of emulated devices."""
    return int(_native.device_count())


def current_device() -> int:
    """Index of this thread's device."""
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    """Makes a device current for this thread."""
    torch.accelerator.set_device_index(_index(device))


def init() -> None:
    """Nothing is left to do."""


_lazy_init = init


def is_initialized() -> bool:
    """Always: importing has done it."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def get_device_name(device: Device = None) -> str:
    """Returns the marketing name, with a word that it is emulated."""
    return f"{NAMES[arch()]} (emulated)"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Returns (major, minor)."""
    return divmod(arch(), 10)


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Returns name, capability, memory in bytes and processors."""
    major, minor = get_device_capability(device)
    total = mem_get_info(device)[1]
    return DeviceProperties(get_device_name(device), major, minor, total, CORES[arch()])


def get_arch_list() -> list[str]:
    """Returns the architectures this build is for: the emulated one."""
    return [f"mp_{arch()}"]


def can_device_access_peer(device: Device, peer: Device) -> bool:
    """Every emulated device can read every other."""
    return _index(device) != _index(peer)


def is_bf16_supported() -> bool:
    """bf16 begins with architecture 22."""
    return arch() >= 22


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types of automatic mixed precision."""
    return [torch.float16, torch.bfloat16] if is_bf16_supported() else [torch.float16]


def synchronize(device: Device = None) -> None:
    """Waits until everything given to the device is done."""
    _native.synchronize(_index(device))


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Device = None, priority: int = 0, **given: Any) -> "Stream":
        if not given:
            given = {"device": torch.device("musa", _index(device)), "priority": priority}
        made: Stream = super().__new__(cls, **given)
        return made


class Event(torch.Event):
    """An event of the device; times are those of the host."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> "Event":
        device = torch.device("musa", current_device())
        made: Event = super().__new__(cls, device, enable_timing=enable_timing, blocking=blocking)
        return made


def current_stream(device: Device = None) -> torch.Stream:
    """Returns this thread's stream on a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    """Returns the stream that is current when none was chosen."""
    place = torch.device("musa", _index(device))
    return torch.Stream(stream_id=0, device_index=place.index, device_type=_PRIVATE_USE)


def set_stream(stream: torch.Stream) -> None:
    """Makes a stream current for this thread."""
    torch.accelerator.set_stream(stream)


class stream:
    """A context in which the stream is current; None changes nothing."""

    def __init__(self, chosen: "torch.Stream | None") -> None:
        self._chosen = chosen
        self._before: torch.Stream | None = None

    def __enter__(self) -> None:
        if self._chosen is not None:
            self._before = current_stream(self._chosen.device)
            set_stream(self._chosen)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            set_stream(self._before)


class device:
    """A context in which the device is current."""

    def __init__(self, chosen: Device) -> None:
        self._chosen = _index(chosen)
        self._before = 0

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._chosen)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def memory_allocated(device: Device = None) -> int:
    """Bytes of tensors on the device."""
    return int(_memory(device)["allocated"])


def max_memory_allocated(device: Device = None) -> int:
    """Most bytes of tensors there were since the peak was reset."""
    return int(_memory(device)["allocated_peak"])


def memory_reserved(device: Device = None) -> int:
    """Bytes the allocator holds, in segments of 2 MiB."""
    return int(_memory(device)["reserved"])


def max_memory_reserved(device: Device = None) -> int:
    """Most bytes the allocator held since the peak was reset."""
    return int(_memory(device)["reserved_peak"])


def memory_stats(device: Device = None) -> dict[str, int]:
    """Returns the statistics tests and reports use, under the names of torch's allocators."""
    found = _memory(device)
    return {
        "allocated_bytes.all.current": found["allocated"],
        "allocated_bytes.all.peak": found["allocated_peak"],
        "reserved_bytes.all.current": found["reserved"],
        "reserved_bytes.all.peak": found["reserved_peak"],
        "allocation.all.allocated": found["allocations"],
        "num_ooms": found["out_of_memory"],
    }


def memory_summary(device: Device = None) -> str:
    """Returns the statistics as lines of text."""
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items())


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Returns free and total bytes."""
    free, total = _native.memory_info(_index(device))
    return int(free), int(total)


def reset_peak_memory_stats(device: Device = None) -> None:
    """Peaks begin anew at what is held now."""
    _native.reset_peak(_index(device))


def empty_cache() -> None:
    """Gives back what the allocator holds and nobody uses."""
    _native.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limits this process to a part of the device."""
    _native.set_memory_limit(_index(device), int(mem_get_info(device)[1] * fraction))


def manual_seed(seed: int) -> None:
    """Random numbers come from the host's generator, which torch.manual_seed has seeded."""


def manual_seed_all(seed: int) -> None:
    """As `manual_seed`."""


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Returns the state of the host's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """Sets the state of the host's generator."""
    torch.set_rng_state(state)


_PRIVATE_USE = 20  # c10::DeviceType::PrivateUse1


def _memory(device: Device) -> dict[str, int]:
    found: dict[str, int] = _native.memory(_index(device))
    return found


def _index(device: Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    place = torch.device(device)
    return current_device() if place.index is None else place.index
