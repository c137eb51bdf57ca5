"""Owns the count of bytes that tensors made in a stretch of code hold at once, operation by
operation.

Knows no step and no device. What an operation frees before it returns is not seen, nor what a
kernel keeps for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As a context: counts what operations within it make, as long as anybody holds it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation, then takes in what it made."""
        out = func(*args, **(kwargs or {}))
        given = {_place(x) for x in _tensors((args, kwargs or {}))}
        self._drop_freed()
        for tensor in _tensors(out):
            place = _place(tensor)
            if place not in given and place not in self._held:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._held[place] = (reference, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._held.values()))
        return out

    def _drop_freed(self) -> None:
        freed = [
            place
            for place, (reference, _) in self._held.items()
            if reference.expired()  # type: ignore[no-untyped-call]
        ]
        for place in freed:
            del self._held[place]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _all(value.values())
    elif isinstance(value, list | tuple):
        yield from _all(value)


def _all(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from _tensors(value)
