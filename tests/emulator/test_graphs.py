"""Graphs: replay on the same memory, no waiting inside, and a limit on how many live."""

from typing import Any

import torch

from firstlight.platforms.find import find_platform
from firstlight.platforms.tools import GraphPool

LIMIT = "4"


def captured(work: Any) -> Any:
    graph = torch.musa.MUSAGraph()
    with torch.musa.graph(graph):
        work()
    return graph


def error_of(work: Any) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""


def replayed() -> list[Any]:
    x, y = torch.zeros(3, device="musa"), torch.zeros(3, device="musa")

    def step() -> None:
        y.copy_(torch.nn.functional.relu(x - 1) * 2)
        y[1:].add_(x[1:])

    graph = captured(step)
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    before = y.tolist()
    graph.replay()
    return [before, y.tolist()]


def test_a_graph_computes_anew_on_the_same_memory(emulated: Any) -> None:
    assert emulated().run(replayed)[0] == [[0.0, 0.0, 0.0], [0.0, 4.0, 7.0]]


def refusals() -> list[str]:
    x = torch.ones(3, device="musa")
    return [
        error_of(lambda: captured(lambda: x.sum().item())),
        error_of(lambda: captured(lambda: x.nonzero())),
        error_of(lambda: captured(lambda: torch.musa.synchronize())),
        error_of(lambda: captured(lambda: x.cpu())),
        str(torch.musa.is_current_stream_capturing()),
        str(x.sum().item()),
    ]


def test_nothing_may_wait_inside_a_graph(emulated: Any) -> None:
    *refused, capturing, after = emulated().run(refusals)[0]
    assert all("not permitted when stream is capturing" in text for text in refused), refused
    assert (capturing, after) == ("False", "3.0")


def too_many() -> tuple[str, int, int]:
    from musa_emulator import control

    x = torch.ones(3, device="musa")
    held = [captured(lambda: x.add_(1)) for _ in range(int(LIMIT))]
    text = error_of(lambda: captured(lambda: x.add_(1)))
    live = control.live_graphs()
    held.pop().reset()
    held.append(captured(lambda: x.add_(1)))
    return text, live, control.live_graphs()


def test_the_driver_holds_a_limited_number(emulated: Any) -> None:
    text, live, again = emulated(EMULATED_MUSA_LIVE_GRAPHS=LIMIT).run(too_many)[0]
    assert "illegal memory access" in text
    assert live == again == int(LIMIT)


def pooled() -> tuple[int, list[float]]:
    """The engine's own pool, told a smaller limit than the driver has."""
    from dataclasses import replace

    spec = replace(find_platform("musa").spec(), max_live_graphs=3)
    pool, x, y = GraphPool(spec), torch.zeros(2, device="musa"), torch.zeros(2, device="musa")
    seen = []
    for size in (1, 2, 3, 4, 5, 1, 2):
        x.fill_(float(size))
        pool.run(size, lambda size=size: y.copy_(x * size))
        seen.append(y[0].item())
    return pool.live, seen


def test_the_pool_of_the_engine_stays_below_it(emulated: Any) -> None:
    live, seen = emulated(EMULATED_MUSA_LIVE_GRAPHS=LIMIT).run(pooled)[0]
    assert live == 3
    assert seen == [1.0, 4.0, 9.0, 16.0, 25.0, 1.0, 4.0]


def on_22() -> str:
    return error_of(lambda: captured(lambda: None))


def test_architecture_22_has_no_graphs(emulated: Any) -> None:
    assert "graphs need architecture 31" in emulated(EMULATED_MUSA_ARCH="22").run(on_22)[0]
