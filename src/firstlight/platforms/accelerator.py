"""Owns the runtime of any accelerator that torch knows as a device type with a module of its own.

Knows no vendor: its stack and traits say what differs, and torch's neutral calls are used wherever
they work.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from firstlight.errors import EnvironmentProblem
from firstlight.platforms.compatibility import quirks_on, read_compatibility
from firstlight.platforms.spec import DeviceSpec, Memory
from firstlight.platforms.stack import VendorStack
from firstlight.platforms.torch_check import require_torch, torch_problem

# How a stack says that it lacks one of torch's neutral calls.
LACKS_CALL = (RuntimeError, AttributeError, TypeError)


class Traits(NamedTuple):
    """What only the vendor's own properties tell of a card; `undecided` is what they don't."""

    arch: int
    cores: int
    capabilities: frozenset[str]
    undecided: frozenset[str] = frozenset()
    max_live_graphs: int | None = None
    versions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AcceleratorRuntime:
    """Devices of one vendor, asked through torch.

    The plug-in of the stack is imported before the device is asked for. `_traits` takes the device
    module and the index.
    """

    _stack: VendorStack = field(repr=False)
    _traits: Callable[[Any, int], Traits] = field(repr=False)

    @property
    def name(self) -> str:
        """Torch's device type."""
        return self._stack.name

    @property
    def collective_backend(self) -> str:
        """The backend torch names for the device, else the vendor's."""
        return self._stack.collective_backend

    def unavailable(self) -> str | None:
        """Why no such device can be used here, with the loader's own words, or None."""
        problem = torch_problem()
        if problem is not None:
            return problem
        try:
            module = self._module()
        except EnvironmentProblem as missing:
            return str(missing)
        if module.device_count() == 0:
            names = " or ".join(self._stack.visible_variables)
            return f"torch sees no {self.name} device; check the driver, and {names} if it is set"
        return None

    def count(self) -> int:
        """Number of visible devices; 0 when the platform is unavailable."""
        return 0 if self.unavailable() else int(self._module().device_count())

    def spec(self, index: int = 0) -> DeviceSpec:
        """The device with its traits and the quirks its versions have."""
        module = self._usable()
        traits, torch = self._traits(module, index), require_torch()
        versions = {"torch": str(torch.__version__), **dict(traits.versions)}
        known = read_compatibility(self.name)
        quirks = quirks_on(known, versions, traits.arch)
        return DeviceSpec(
            name=str(module.get_device_name(index)),
            kind=self.name,
            index=index,
            memory=self.memory(index),
            cores=traits.cores,
            capabilities=traits.capabilities,
            notes=traits.notes,
            vendor=self._stack.vendor,
            arch=traits.arch,
            collective_backend=self.collective_backend,
            visible_variables=self._stack.visible_variables,
            versions=tuple(versions.items()),
            undecided=traits.undecided,
            quirks=frozenset(quirk.name for quirk in quirks),
            max_live_graphs=traits.max_live_graphs,
        )

    def memory(self, index: int = 0) -> Memory:
        """What the driver reports as total and free."""
        free, total = self._call("get_memory_info", "mem_get_info", index)
        return Memory(total_bytes=int(total), available_bytes=int(free))

    def peak_bytes(self, index: int = 0) -> int:
        """Most bytes torch's allocator has reserved on the device."""
        return int(self._call("max_memory_reserved", "max_memory_reserved", index))

    def bind(self, index: int, threads: int) -> str:
        """Makes the device current, before any kernel package is imported; `threads` are torch's
        host threads.
        """
        require_torch().set_num_threads(threads)
        self._usable()
        self._call("set_device_index", "set_device", index)
        return f"{self.name}:{index}"

    def synchronize(self, index: int = 0) -> None:
        """Waits for all streams of the device."""
        self._call("synchronize", "synchronize", index)

    def release_cached(self, index: int = 0) -> None:
        """Returns unused blocks of torch's allocator to the driver."""
        self._call("empty_cache", "empty_cache")

    def _call(self, neutral: str, own: str, *arguments: int) -> Any:
        """Calls torch.accelerator's function, or the module's where the stack lacks that."""
        module, accelerator = self._usable(), getattr(require_torch(), "accelerator", None)
        current = accelerator.current_accelerator() if accelerator else None
        if current is not None and current.type == self.name:
            try:
                return getattr(accelerator, neutral)(*arguments)
            except LACKS_CALL as lacking:
                # A module that lacks the call as well leaves the first words standing.
                if not hasattr(module, own):
                    raise EnvironmentProblem(f"{self.name} has no {own}: {lacking}") from lacking
        return getattr(module, own)(*arguments)

    def _module(self) -> Any:
        torch, package = require_torch(), self._stack.plugin
        if not hasattr(torch, self.name) and package:
            if importlib.util.find_spec(package) is None:
                raise EnvironmentProblem(f"{package} is not installed; install the vendor's build")
            try:
                importlib.import_module(package)
            except (ImportError, OSError) as broken:
                raise EnvironmentProblem(f"{package} does not load: {broken}") from broken
        module = getattr(torch, self.name, None)
        if module is None:
            raise EnvironmentProblem(f"this torch ({torch.__version__}) has no {self.name} device")
        return module

    def _usable(self) -> Any:
        reason = self.unavailable()
        if reason is not None:
            raise EnvironmentProblem(f"platform {self.name} cannot be used: {reason}")
        return self._module()
