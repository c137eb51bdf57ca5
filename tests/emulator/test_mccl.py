"""The collectives of the emulated device, and the documented ways in which MCCL differs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankFailure


def place() -> str:
    torch.accelerator.set_device_index(dist.get_rank())
    return f"musa:{dist.get_rank()}"


def collectives() -> dict[str, Any]:
    device, rank = place(), dist.get_rank()
    mine = torch.arange(4.0, device=device) + 10 * rank
    found: dict[str, Any] = {"backend": dist.get_backend()}

    summed = mine.clone()
    found["nothing returned"] = dist.all_reduce(summed) is None
    found["sum"] = summed.tolist()
    averaged = mine.bfloat16()
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    found["average"] = averaged.tolist()

    whole = torch.empty(8, device=device)
    dist.all_gather_into_tensor(whole, mine)
    found["gathered"] = whole.tolist()
    parts = [torch.empty_like(mine, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(parts, mine.to(torch.uint8))
    found["listed"] = [part.tolist() for part in parts]
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, mine)
    found["scattered sum"] = part.tolist()

    sent = torch.arange(3, device=device) + 10 * rank
    received = torch.empty(4 if rank else 2, dtype=torch.int64, device=device)
    splits = [2, 2] if rank else [1, 1]
    dist.all_to_all_single(received, sent, splits, [1, 2])
    found["exchanged"] = received.tolist()

    dist.broadcast(mine, 1)
    found["broadcast"] = mine.tolist()
    objects: list[Any] = [{"rank": rank}]
    dist.broadcast_object_list(objects, 0, device=torch.device(device))
    found["object"] = objects[0]
    dist.barrier()
    return found


def test_collectives_give_what_they_should(emulated: Any) -> None:
    first, second = emulated(2).run(collectives)
    assert first["backend"] == "mccl" and first["nothing returned"]
    for found in (first, second):
        assert found["sum"] == [10.0, 12.0, 14.0, 16.0]
        assert found["average"] == [5.0, 6.0, 7.0, 8.0]
        assert found["gathered"] == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
        assert found["listed"] == [[0, 1, 2, 3], [10, 11, 12, 13]]
        assert found["broadcast"] == [10.0, 11.0, 12.0, 13.0]
        assert found["object"] == {"rank": 0}
    assert (first["scattered sum"], second["scattered sum"]) == ([10.0, 12.0], [14.0, 16.0])
    assert (first["exchanged"], second["exchanged"]) == ([0, 10], [1, 2, 11, 12])


def exchange(device: str) -> list[float]:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    mine, other = torch.full((3,), float(rank), device=device), torch.empty(3, device=device)
    waits = [dist.isend(mine, peer), dist.irecv(other, peer)]
    for work in waits:
        work.wait()
    seen: list[float] = other.tolist()
    return seen


def neighbours() -> list[float]:
    return exchange(place())


def test_ranks_send_to_each_other(emulated: Any) -> None:
    assert emulated(2).run(neighbours) == [[1.0] * 3, [0.0] * 3]


def started_sum(wait: bool) -> list[float]:
    mine = torch.ones(3, device=place())
    work = dist.all_reduce(mine, async_op=True)
    if wait:
        work.wait()
    seen: list[float] = mine.tolist()
    work.wait()
    return seen


def test_a_started_collective_shows_nothing_before_the_wait(emulated: Any) -> None:
    assert emulated(2).run(started_sum, True) == [[2.0] * 3] * 2
    assert emulated(2).run(started_sum, False) == [[1.0] * 3] * 2


def refused(what: str) -> None:
    device = place()
    x = torch.ones(4, device=device)
    if what == "host":
        dist.all_reduce(x.cpu())
    elif what == "strided":
        dist.all_reduce(torch.ones(4, 4, device=device).t()[::2])
    elif what == "bits":
        dist.all_reduce(x.int(), op=dist.ReduceOp.BOR)
    elif what == "anybody":
        dist.recv(x)
    elif what == "empty part":
        dist.all_to_all_single(torch.empty(4, device=device), x, [4, 0], [4, 0])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("host", "Tensors must be MUSA and dense"),
        ("strided", "Tensors must be MUSA and dense"),
        ("bits", "does not support"),
        ("anybody", "recvAnysource"),
        ("empty part", "Watchdog caught collective operation timeout"),
    ],
)
def test_what_mccl_cannot_do_fails(emulated: Any, what: str, words: str) -> None:
    with pytest.raises(RankFailure) as failure:
        emulated(2).run(refused, what)
    assert words in failure.value.traceback


def architecture_22() -> list[str]:
    found = []
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        try:
            dist.all_reduce(torch.ones(4).to(dtype).to("musa"))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_architecture_22_sends_no_fp8(emulated: Any) -> None:
    found = emulated(EMULATED_MUSA_ARCH="22").run(architecture_22)[0]
    assert len(found) == 1 and "float8" in found[0]


def backends_there() -> bool:
    return "mccl" in dist.Backend.backend_list


def test_architecture_21_has_no_collectives(emulated: Any) -> None:
    assert emulated().run(backends_there) == [True]
    assert emulated(EMULATED_MUSA_ARCH="21").run(backends_there) == [False]
