"""Owns the process group `mccl` of the emulated device: gloo over host copies, with MCCL's faults.

An operation that was asked to be asynchronous leaves its outputs untouched until somebody waits for
it, so that a missing wait is seen. Knows the documented limits of MCCL and nothing of a model.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_musa import device_module

ReduceOp = dist.ReduceOp
_NO_REDUCTION = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# How long a call that would hang for ever does before the watchdog ends it.
_HANG_SECONDS = 0.5


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> "EmulatedMccl":
    """What torch calls for `init_process_group("mccl")` and `new_group`."""
    return EmulatedMccl(store, rank, size, timeout)


class EmulatedWork(dist.Work):
    """An operation that was started. Its results reach the device when `wait` is called."""

    def __init__(self, future: "Future[list[Tensor]]", outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._running = future
        self._outputs = list(outputs)
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the result and writes it; raises what the operation raised."""
        results = self._running.result()
        if not self._waited:
            for output, values in zip(self._outputs, results, strict=True):
                output.copy_(values.view(output.dtype).view(output.shape))
        self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether the ranks have exchanged their data."""
        return self._running.done()

    def get_future(self) -> Any:
        """Returns a future that is done, after waiting."""
        self.wait()
        done: Any = torch.futures.Future()
        done.set_result(self._outputs)
        return done


class EmulatedMccl(dist.ProcessGroup):
    """Collectives of tensors on `musa`, in the order they were asked for, one at a time."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emulated-mccl")
        self._name = ""

    def getBackendName(self) -> str:
        """The backend's name."""
        return "mccl"

    def setGroupName(self, name: str) -> None:
        """Keeps the name torch gives."""
        self._name = name

    def getGroupName(self) -> str:
        """Returns the name torch gave."""
        return self._name

    @property
    def group_name(self) -> str:
        """The name torch gave."""
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduces one tensor in place on every rank."""
        tensor = _only(tensors)
        opts = opts or dist.AllreduceOptions()
        operation = _reduction(opts.reduceOp, tensor)

        def work(staged: list[Tensor]) -> list[Tensor]:
            plain = dist.AllreduceOptions()
            plain.reduceOp = operation
            self._gloo.allreduce(staged, plain).wait()
            return [_averaged(staged[0], opts.reduceOp, self.size())]

        return self._issue(work, [tensor], [tensor], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduces tensors one after another."""
        for tensor in tensors:
            work = self.allreduce([tensor], opts)
        return work

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduces to one rank; the others keep what they had."""
        tensor = _only(tensors)
        operation = _reduction(opts.reduceOp, tensor)
        mine = opts.rootRank == self.rank()

        def work(staged: list[Tensor]) -> list[Tensor]:
            before, plain = staged[0].clone(), dist.AllreduceOptions()
            plain.reduceOp = operation
            self._gloo.allreduce(staged, plain).wait()
            return [_averaged(staged[0], opts.reduceOp, self.size()) if mine else before]

        return self._issue(work, [tensor], [tensor], opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Sends one rank's tensor to all."""
        tensor = _only(tensors)

        def work(staged: list[Tensor]) -> list[Tensor]:
            data = [_bytes(staged[0])]
            self._gloo.broadcast(data, opts).wait()
            return data

        return self._issue(work, [tensor], [tensor], opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Fills `output` with every rank's tensor, in rank order."""

        def work(staged: list[Tensor]) -> list[Tensor]:
            return [torch.cat(self._gathered(staged[0]))]

        return self._issue(work, [tensor], [output], opts)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Fills one tensor for every rank."""
        return self._issue(
            lambda staged: self._gathered(staged[0]), [_only(tensors)], outputs[0], opts
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Reduces and gives each rank its part."""
        opts = opts or dist.ReduceScatterOptions()
        operation = _reduction(opts.reduceOp, tensor)

        def work(staged: list[Tensor]) -> list[Tensor]:
            plain = dist.AllreduceOptions()
            plain.reduceOp = operation
            self._gloo.allreduce(staged, plain).wait()
            whole = _averaged(staged[0], opts.reduceOp, self.size()).flatten()
            return [whole.chunk(self.size())[self.rank()]]

        return self._issue(work, [tensor], [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """As `reduce_scatter_single`, of a list of parts."""
        whole = torch.cat([part.flatten() for part in inputs[0]])
        return self.reduce_scatter_single(_only(outputs), whole, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Exchanges parts of rows between all ranks. Empty parts hang, as before 2.11.0.post1."""
        received = output_splits or [len(output) // self.size()] * self.size()
        sent = input_splits or [len(tensor) // self.size()] * self.size()
        _refuse_empty(received + sent)
        row_bytes = output[:1].nbytes

        def work(staged: list[Tensor]) -> list[Tensor]:
            everything = self._gathered_uneven(_bytes(staged[0]), sent, row_bytes)
            return [torch.cat([parts[self.rank()] for parts in everything])]

        return self._issue(work, [tensor], [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Exchanges a list of tensors between all ranks."""
        _refuse_empty([t.numel() for t in (*outputs, *inputs)])
        sizes = [t.nbytes for t in inputs]

        def work(staged: list[Tensor]) -> list[Tensor]:
            whole = torch.cat([_bytes(t) for t in staged])
            return [parts[self.rank()] for parts in self._gathered_uneven(whole, sizes, 1)]

        return self._issue(work, inputs, outputs, opts)

    def gather(self, outputs: Any, tensors: Any, opts: Any) -> Any:
        """Collects every rank's tensor on one rank."""
        targets = outputs[0] if opts.rootRank == self.rank() else []
        return self._issue(
            lambda staged: self._gathered(staged[0])[: len(targets)],
            [_only(tensors)],
            targets,
            opts,
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gives each rank its tensor of one rank's list."""
        output, root = _only(outputs), opts.rootRank == self.rank()

        def work(staged: list[Tensor]) -> list[Tensor]:
            parts = [_bytes(t) for t in staged]
            data = torch.cat(parts) if root else torch.zeros(
                output.nbytes * self.size(), dtype=torch.uint8
            )  # fmt: skip
            plain = dist.BroadcastOptions()
            plain.rootRank = opts.rootRank
            self._gloo.broadcast([data], plain).wait()
            return [data.chunk(self.size())[self.rank()]]

        return self._issue(work, inputs[0] if root else [], [output], opts)

    def send(self, tensors: Any, target: int, tag: int) -> Any:
        """Sends to one rank; the work it returns is done when the receiver has it."""
        data = [_bytes(_only(tensors).cpu())]
        return EmulatedWork(self._thread.submit(self._sent, data, target, tag), [])

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        """Receives from one named rank."""
        tensor = _only(tensors)
        data = [torch.empty(tensor.nbytes, dtype=torch.uint8)]
        started = self._gloo.recv(data, source, tag)

        def work() -> list[Tensor]:
            started.wait()
            return data

        return EmulatedWork(ThreadPoolExecutor(1).submit(work), [tensor])

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """MCCL cannot."""
        raise RuntimeError("ProcessGroupMCCL does not support recvAnysource")

    def allgather_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """MCCL cannot."""
        raise RuntimeError("ProcessGroupMCCL does not support allgather_coalesced")

    def barrier(self, opts: Any = None) -> Any:
        """Waits for all ranks, after everything that was asked for before."""
        torch.musa.synchronize()

        def work(_: list[Tensor]) -> list[Tensor]:
            self._gloo.barrier(dist.BarrierOptions()).wait()
            return []

        return self._issue(work, [], [], opts)

    def shutdown(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False)

    def _issue(
        self,
        work: Callable[[list[Tensor]], list[Tensor]],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
    ) -> EmulatedWork | None:
        """Starts an operation. A synchronous one is over when this returns, and gives None."""
        for tensor in (*inputs, *outputs):
            _check(tensor)
        staged = [tensor.cpu().clone() for tensor in inputs]
        started = EmulatedWork(self._thread.submit(work, staged), outputs)
        if opts is not None and getattr(opts, "asyncOp", False):
            return started
        started.wait()
        return None

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        mine = _bytes(tensor)
        parts = [torch.empty_like(mine) for _ in range(self.size())]
        self._gloo.allgather([parts], [mine]).wait()
        return parts

    def _gathered_uneven(
        self, data: Tensor, splits: Sequence[int], row_bytes: int
    ) -> list[tuple[Tensor, ...]]:
        """Returns what every rank sends to every rank, as bytes, by sender and receiver."""
        sizes = [part.view(torch.int64) for part in self._gathered(torch.tensor(splits))]
        longest = max(int(part.sum()) for part in sizes) * row_bytes
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        return [
            whole[: int(part.sum()) * row_bytes].split([int(n) * row_bytes for n in part])
            for whole, part in zip(self._gathered(padded), sizes, strict=True)
        ]

    def _sent(self, data: list[Tensor], target: int, tag: int) -> list[Tensor]:
        self._gloo.send(data, target, tag).wait()
        return []


def _only(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    assert len(tensors) == 1, "MCCL takes one tensor of this device"
    tensor: Tensor = tensors[0]
    return tensor


def _check(tensor: Tensor) -> None:
    if tensor.device.type != "musa" or not tensor.is_contiguous():
        raise RuntimeError("Tensors must be MUSA and dense")
    if tensor.dtype == torch.bfloat16 and device_module.arch() < 22:
        raise RuntimeError("MCCL sends bfloat16 from architecture 22 on")
    if tensor.dtype in _FP8 and device_module.arch() < 31:
        raise RuntimeError("MCCL sends float8 from architecture 31 on; view it as uint8")


def _reduction(wanted: Any, tensor: Tensor) -> Any:
    """Returns what gloo is asked for: averages are sums that are divided afterwards."""
    if any(wanted == refused for refused in _NO_REDUCTION):
        raise RuntimeError(f"ProcessGroupMCCL does not support {wanted}")
    if wanted != ReduceOp.AVG:
        return wanted
    if tensor.dtype == torch.bool:
        raise RuntimeError("ProcessGroupMCCL does not support AVG of bool")
    return ReduceOp.SUM


def _averaged(tensor: Tensor, wanted: Any, size: int) -> Tensor:
    return tensor.div_(size) if wanted == ReduceOp.AVG else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _refuse_empty(sizes: Sequence[int]) -> None:
    if 0 not in sizes or os.environ.get("EMULATED_MUSA_EMPTY_EXCHANGE") == "right":
        return
    time.sleep(_HANG_SECONDS)
    raise RuntimeError(
        "Watchdog caught collective operation timeout: ALLTOALL_BASE with an empty part (emulated: "
        "inter-node exchanges hang on stacks before 2.11.0.post1)"
    )
