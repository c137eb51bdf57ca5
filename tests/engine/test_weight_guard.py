"""When weights are read, how much at a time, and what damage does to requests."""

from collections import deque
from typing import Any

import pytest

from firstlight.checkpoint.damage import Damage
from firstlight.engine.constraints import Constraints
from firstlight.engine.loop import EngineLoop
from firstlight.engine.messages import (
    CheckWeights,
    Drain,
    Outputs,
    ReloadWeights,
    Submit,
    WeightsReloaded,
    WeightsReport,
)
from firstlight.engine.startup import Running
from firstlight.engine.weight_guard import LEAST_BYTES, WeightGuard
from firstlight.errors import BadInput, CheckFailed
from firstlight.metrics.series import Series
from firstlight.runner import protocol
from firstlight.schedule.request import FinishReason, SubmittedRequest
from local_engine import LocalEngine, greedy
from tiny_models import tiny_config, write_checkpoint

DAMAGE = Damage(1, "layer-002", "layers.2.mlp.up_proj.weight", None, 7)


class Ranks:
    """Two ranks as far as weights go: so many bytes at a rate, some of them `damaged`."""

    def __init__(self, num_bytes: int, clock: Any = None, rate: float = 1e9) -> None:
        self.num_bytes, self.clock, self.rate = num_bytes, clock, rate
        self.read: list[int] = []
        self.rounds: list[int] = []
        self.damaged: list[Damage] = []
        self._round, self._at = -1, 0

    def send(self, order: Any) -> None:
        self._order = order

    def collect(self, kind: type[Any], **_: Any) -> list[Any]:
        if isinstance(self._order, protocol.AgreeOnWeights):
            return [protocol.WeightsAgreed(rank, "v1", self.num_bytes, 0.1) for rank in (0, 1)]
        if self._order.round != self._round:
            self._round, self._at = self._order.round, 0
            self.rounds.append(self._round)
        count = min(self._order.num_bytes, self.num_bytes - self._at)
        self._at += count
        self.read.append(count)
        if self.clock is not None:
            self.clock.now += count / self.rate
        through = self._at == self.num_bytes
        found = self.damaged if through else []
        return [
            protocol.WeightsChecked(
                rank, self._round, count, count / self.rate, through,
                [one for one in found if one.rank == rank],
            )
            for rank in (0, 1)
        ]  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_round_is_spread_over_its_period_and_no_turn_is_long() -> None:
    clock, series = Clock(), Series()
    ranks = Ranks(20 * 10**9, clock)  # 20 s to read
    guard = WeightGuard(ranks, series, period_seconds=1000, clock=clock)  # type: ignore[arg-type]
    guard.agree()
    while clock.now < 3000:
        clock.now += 0.03  # a step
        assert guard.turn(busy=True) == []
    assert len(ranks.rounds) == 3 or (len(ranks.rounds) == 4 and ranks.read[-1] < 10**9)
    assert max(ranks.read) <= 0.02 * 1e9 + LEAST_BYTES
    counted = series.flatten()
    assert counted["weights_checks_total"] in (2, 3) and counted["weights_damages_total"] == 0
    assert 900 < counted["weights_round_seconds"] <= 1001


def test_without_a_period_weights_are_read_only_when_asked() -> None:
    clock = Clock()
    ranks = Ranks(5 * LEAST_BYTES, clock)
    guard = WeightGuard(ranks, Series(), period_seconds=0, clock=clock)  # type: ignore[arg-type]
    guard.agree()
    clock.now = 1e6
    assert guard.turn(busy=False) == [] and ranks.read == []
    guard.ask("a")
    guard.ask("b")  # shares the round
    reports: list[WeightsReport] = []
    while not reports:
        reports = guard.turn(busy=False)
    assert [r.check_id for r in reports] == ["a", "b"] and not guard.is_asked
    assert [r.num_bytes for r in reports[0].ranks] == [5 * LEAST_BYTES] * 2


def test_damage_is_named_in_one_line_and_by_rank() -> None:
    ranks = Ranks(100)
    guard = WeightGuard(ranks, Series(), period_seconds=0)  # type: ignore[arg-type]
    guard.agree()
    ranks.damaged = [DAMAGE, *(Damage(0, "layer-001", "w", e, 0, 2) for e in range(4))]
    guard.ask("a")
    (report,) = guard.turn(busy=True)
    assert [len(rank.damages) for rank in report.ranks] == [4, 1]
    assert guard.problem is not None and guard.problem.endswith("; and 2 more")
    assert "rank 0: layer-001, w, expert 0, granules 0 to 1" in guard.problem
    guard.agree()  # as after a reload
    assert guard.problem is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("guard")
    write_checkpoint(made, tiny_config("llama2"))
    return made


class StepRanks(Ranks):
    """A real runner's steps beside the weights above; damage comes after so many steps."""

    def __init__(self, engine: LocalEngine, after: int) -> None:
        super().__init__(100)
        self._engine, self._after, self.num_steps = engine, after, 0

    def collect(self, kind: type[Any], **more: Any) -> list[Any]:
        if not isinstance(self._order, protocol.RunStep):
            return super().collect(kind)
        self.num_steps += 1
        if self.num_steps == self._after:
            self.damaged = [DAMAGE]
        return [protocol.StepDone(0, self._engine.runner.run(self._order.plan), 0, 0)]

    def check_alive(self) -> None:
        """Always."""


def serve(folder: Any, messages: Any, reload: Any = None, after: int = 4) -> tuple[list[Any], Any]:
    """Runs a loop over messages that come at (step, message); returns all it sent, and itself."""
    engine, sent, script = LocalEngine(folder), [], deque(messages)
    ranks = StepRanks(engine, after)
    guard = WeightGuard(ranks, Series(), period_seconds=0.0001)  # type: ignore[arg-type]
    guard.agree()
    running: Any = Running(
        ranks, engine.scheduler, engine.cache, engine.spec, 512,
        {"kv_bytes_per_rank": 1000, "source_digest": "v1", "known_answers": "hold"}, guard=guard,
    )  # fmt: skip

    def receive(wait: float) -> Any:
        if script and (wait > 0 or script[0][0] <= ranks.num_steps):
            return script.popleft()[1]
        return None

    loop = EngineLoop(
        running, Series(), constraints=Constraints(lambda: None), receive=receive,
        send=sent.append, advanced=lambda: None,
        reload=lambda source: reload(source, ranks, guard),
    )  # fmt: skip
    loop.serve()
    engine.scheduler.check_integrity()
    return sent, loop


def request(name: str, count: int = 30) -> SubmittedRequest:
    return SubmittedRequest(request_id=name, prompt_ids=[5, 6, 7], params=greedy(count))


def last(sent: list[Any], name: str) -> Any:
    return [o for m in sent if isinstance(m, Outputs) for o in m.outputs if o.request_id == name][
        -1
    ]


def repaired(source: Any, ranks: Any, guard: Any) -> None:
    if source == "bad":
        raise BadInput("bad: no such file")
    if source == "worse":
        raise CheckFailed("the weights of worse do not give the known answers")
    ranks.damaged = []
    guard.agree()


def test_damage_ends_requests_with_the_reason_until_a_reload(folder: Any) -> None:
    messages = [  # all but the first come when nothing runs
        (0, Submit([request("a"), request("b")])),
        (99, Submit([request("late")])),
        (99, ReloadWeights("r1", "bad")),
        (99, ReloadWeights("r2", "worse")),
        (99, Submit([request("closed")])),
        (99, ReloadWeights("r3")),
        (99, Submit([request("new", 3)])),
        (99, CheckWeights("c")),
        (99, Drain()),
    ]
    sent, loop = serve(folder, messages, repaired)
    for name in ("a", "b"):
        ended = last(sent, name)
        assert ended.finish is FinishReason.ERROR and DAMAGE.line() in ended.error
    assert last(sent, "late").refusal == "unhealthy" and DAMAGE.line() in last(sent, "late").error
    answers = {m.reload_id: m for m in sent if isinstance(m, WeightsReloaded)}
    assert answers["r1"].refusal == "bad_source" and answers["r3"].problem == ""
    assert "known answers" in answers["r2"].problem and not answers["r2"].refusal
    assert last(sent, "closed").refusal == "unhealthy"
    assert last(sent, "new").finish is FinishReason.LENGTH
    assert [m.check_id for m in sent if isinstance(m, WeightsReport)] == ["c"]
    assert loop.unhealthy is None and not loop.is_reloading


def test_a_reload_waits_for_running_requests_and_refuses_new_ones(folder: Any) -> None:
    messages = [
        (0, Submit([request("a", 12)])),
        (3, ReloadWeights("r")),
        (3, ReloadWeights("again")),
        (4, Submit([request("early", 3)])),
        (99, Submit([request("new", 3)])),
        (99, Drain()),
    ]
    sent, _ = serve(folder, messages, repaired, after=-1)
    assert last(sent, "a").finish is FinishReason.LENGTH
    assert last(sent, "early").refusal == "reloading" and last(sent, "new").finish is not None
    answers = [m for m in sent if isinstance(m, WeightsReloaded)]
    assert [(m.reload_id, m.refusal) for m in answers] == [("again", "reloading"), ("r", "")]
    assert sent.index(answers[1]) > max(
        i for i, m in enumerate(sent) if isinstance(m, Outputs) and m.outputs[0].request_id == "a"
    )
