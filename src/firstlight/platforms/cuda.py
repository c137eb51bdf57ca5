"""Owns CUDA devices as torch offers them; written from documentation, not yet run on one.

Knows no kernel and no model; imports torch only when asked something that needs a device.
"""

from __future__ import annotations

from typing import Any

from firstlight.errors import EnvironmentProblem
from firstlight.platforms.spec import DeviceSpec, Memory
from firstlight.platforms.torch_check import require_torch, torch_problem

UNTESTED = "this platform was written from documentation and has not been run on a device"


class CudaRuntime:
    """The CUDA devices visible to this process."""

    name = "cuda"
    collective_backend = "nccl"

    def unavailable(self) -> str | None:
        """Why no CUDA device can be used here, or None."""
        problem = torch_problem()
        if problem is not None:
            return problem
        device = require_torch().cuda
        if not device.is_available() or device.device_count() == 0:
            return "torch sees no CUDA device; check the driver, and that torch was built for it"
        return None

    def count(self) -> int:
        """Number of visible devices; 0 when the platform is unavailable."""
        return 0 if self.unavailable() else int(self._cuda().device_count())

    def spec(self, index: int = 0) -> DeviceSpec:
        """The device's name, multiprocessors and memory."""
        properties = self._cuda().get_device_properties(index)
        dtypes = {"float32", "float16", "int8"}
        if (properties.major, properties.minor) >= (8, 0):
            dtypes.add("bfloat16")
        if (properties.major, properties.minor) >= (8, 9):
            dtypes.add("float8")
        return DeviceSpec(
            name=str(properties.name),
            kind=self.name,
            index=index,
            memory=self.memory(index),
            cores=int(properties.multi_processor_count),
            capabilities=frozenset(dtypes | {"streams", "graphs"}),
            notes=(UNTESTED,),
        )

    def memory(self, index: int = 0) -> Memory:
        """What the driver reports as total and free."""
        free, total = self._cuda().mem_get_info(index)
        return Memory(total_bytes=int(total), available_bytes=int(free))

    def peak_bytes(self, index: int = 0) -> int:
        """Most bytes torch's allocator has reserved on the device."""
        return int(self._cuda().max_memory_reserved(index))

    def bind(self, index: int, threads: int) -> str:
        """Makes the device current; `threads` are torch's host threads."""
        require_torch().set_num_threads(threads)
        self._cuda().set_device(index)
        return f"{self.name}:{index}"

    def synchronize(self, index: int = 0) -> None:
        """Waits for all streams of the device."""
        self._cuda().synchronize(index)

    def release_cached(self, index: int = 0) -> None:
        """Returns unused blocks of torch's allocator to the driver."""
        self._cuda().empty_cache()

    def _cuda(self) -> Any:
        reason = self.unavailable()
        if reason is not None:
            raise EnvironmentProblem(f"platform {self.name} cannot be used: {reason}")
        return require_torch().cuda
