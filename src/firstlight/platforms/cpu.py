"""Owns the CPU as a device: always there, computing in the host's memory over gloo.

Knows torch only while a rank runs on it; asking what the machine has needs none.
"""

from __future__ import annotations

import resource

from firstlight.platforms.host import Host, read_host
from firstlight.platforms.spec import DeviceSpec, Memory
from firstlight.platforms.stack import Platform, VendorStack
from firstlight.platforms.torch_check import require_torch

# FP8 is held and turned into floats; no product of it is computed.
_DTYPES = frozenset({"float32", "bfloat16", "float16", "int8", "fp8_storage"})


def cpu_features() -> frozenset[str]:
    """The processor's flags as the kernel names them, such as `avx2` and `avx512f`."""
    return read_host().cpu_features


class CpuRuntime:
    """The host's processors as one device."""

    name = "cpu"
    collective_backend = "gloo"

    def unavailable(self) -> str | None:
        """Always None: there is a processor."""
        return None

    def count(self) -> int:
        """One device, however many sockets."""
        return 1

    def spec(self, index: int = 0) -> DeviceSpec:
        """The processor with its flags, and the cores and memory this process may use."""
        host: Host = read_host()
        return DeviceSpec(
            name=host.processor,
            kind=self.name,
            index=index,
            memory=host.memory,
            cores=host.cores,
            capabilities=_DTYPES | {"host_memory"},
            cpu_features=host.cpu_features,
            notes=host.notes,
            vendor="host",
            collective_backend=self.collective_backend,
        )

    def memory(self, index: int = 0) -> Memory:
        """The host's memory within the limits of the control group."""
        return read_host().memory

    def peak_bytes(self, index: int = 0) -> int:
        """Largest resident size of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def bind(self, index: int, threads: int) -> str:
        """Sets torch's compute threads for this process."""
        require_torch().set_num_threads(threads)
        return self.name

    def synchronize(self, index: int = 0) -> None:
        """Nothing is queued: every operation has ended when its call returns."""

    def release_cached(self, index: int = 0) -> None:
        """Nothing is held: the allocator is the process's own."""


RUNTIME = CpuRuntime()
STACK = VendorStack(name="cpu", vendor="host", machines=("x86_64", "aarch64"))
PLATFORM = Platform(RUNTIME, STACK)
