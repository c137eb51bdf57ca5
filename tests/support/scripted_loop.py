"""An engine's loop in this process: a real scheduler, runner and grammars; messages as a script."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from firstlight.engine.constraints import Constraints, open_factory
from firstlight.engine.loop import EngineLoop
from firstlight.engine.messages import FromEngine, Output, Outputs, ToEngine
from firstlight.engine.ranks import RankFailure
from firstlight.engine.startup import Running
from firstlight.metrics.series import Series
from firstlight.runner.protocol import RankProgress, RunStep, StepDone
from local_engine import EngineShape, LocalEngine


class RankInThisProcess:
    """Stands in for the rank processes: one real runner; `dies_after` steps it is gone."""

    def __init__(self, engine: LocalEngine, dies_after: int | None = None) -> None:
        self._engine = engine
        self._dies_after = dies_after
        self.num_steps = 0

    def send(self, order: RunStep) -> None:
        self._order = order

    def collect(self, kind: type[StepDone], *, on_progress) -> list[StepDone]:
        self.check_alive()
        on_progress(RankProgress(0, "step", 0.0))  # as a rank does in a long step
        self.num_steps += 1
        return [StepDone(0, self._engine.runner.run(self._order.plan), 0, 0)]

    def check_alive(self) -> None:
        if self.num_steps == self._dies_after:
            raise RankFailure("rank 0 was killed by signal 9", 4)


class Outside:
    """What the API process is to the loop: messages that come after so many steps, and answers."""

    def __init__(self, ranks: RankInThisProcess, messages: Iterable[tuple[int, ToEngine]]) -> None:
        self._ranks = ranks
        self._messages = deque(messages)
        self.outputs: list[Output] = []

    def receive(self, wait_seconds: float) -> ToEngine | None:
        is_idle = wait_seconds > 0
        if self._messages and (is_idle or self._messages[0][0] <= self._ranks.num_steps):
            return self._messages.popleft()[1]
        return None

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, Outputs)
        self.outputs += message.outputs

    def tokens(self, request_id: str) -> list[int]:
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]

    def last(self, request_id: str) -> Output:
        return [o for o in self.outputs if o.request_id == request_id][-1]


def serve_script(
    folder: Path,
    *messages: tuple[int, ToEngine],
    shape: EngineShape | None = None,
    dies_after: int | None = None,
) -> tuple[Outside, LocalEngine, dict[str, Any]]:
    """Runs a loop to its end; the engine then holds nothing."""
    engine, series = LocalEngine(folder, shape), Series()
    ranks = RankInThisProcess(engine, dies_after)
    outside = Outside(ranks, messages)
    running: Any = Running(
        ranks,  # type: ignore[arg-type]
        engine.scheduler,
        engine.cache,
        engine.spec,
        512,
        {"kv_bytes_per_rank": 1000},
    )
    advanced: list[None] = []
    loop = EngineLoop(
        running,
        series,
        constraints=Constraints(lambda: open_factory(folder, engine.spec.vocab_size)),
        receive=outside.receive,
        send=outside.send,
        advanced=lambda: advanced.append(None),
    )
    loop.serve()
    engine.scheduler.check_integrity()
    assert not loop.busy and len(advanced) == 2 * ranks.num_steps
    return outside, engine, series.flatten()
