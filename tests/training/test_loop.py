"""A run lowers its loss, stops and goes on as if it had not, and refuses what is not its own."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from firstlight.errors import ConfigError
from firstlight.training.loop import STATE_FILE, Run, Schedule, Stage, train
from firstlight.training.model import build_trainable
from firstlight.training.operations import training_kernels
from firstlight.training.state import load_state
from tiny_training import Echo, tiny_config


def make_run(*, steps: int = 6, last: int = 4, seed: int = 3) -> Run:
    model = build_trainable(tiny_config(), training_kernels(), seed)
    plain, published = Schedule(steps, 3e-3), Schedule(last, 3e-3, published=True)
    return Run(model, [Stage("plain", plain, Echo()), Stage("published", published, Echo())])


def values_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.module.named_parameters()}


def test_the_loss_falls(tmp_path: Path) -> None:
    run = make_run(steps=80, last=1)
    losses: list[float] = []
    assert train(run, tmp_path, report=lambda step: losses.append(step.loss))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert len(run.progress.history) == 81 and run.progress.levels["heard"] == 81 * 8


@pytest.mark.parametrize("stop", [1, 5, 6, 8])
def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path, stop: int) -> None:
    whole = make_run()
    train(whole, tmp_path, report=lambda step: None)
    first = make_run()
    for _ in range(stop):
        first.take_step()
    first.keep(tmp_path / STATE_FILE)
    second = make_run(seed=4)  # other values, which the state replaces
    second.resume(tmp_path / STATE_FILE)
    while not second.is_done:
        second.take_step()
    assert second.progress.history == whole.progress.history
    want = values_of(whole)
    assert all(torch.equal(value, want[name]) for name, value in values_of(second).items())


def test_time_that_is_up_ends_a_run_after_a_step(tmp_path: Path) -> None:
    run = make_run()
    assert not train(run, tmp_path, seconds=0.0, report=lambda step: None)
    assert run.progress.total == 1 and (tmp_path / STATE_FILE).is_file()


def test_a_step_without_finite_gradients_changes_no_weight() -> None:
    run = make_run()
    run.take_step()
    with torch.no_grad():
        run.model.module.head.norm.weight[0] = torch.nan
    before = values_of(run)
    assert run.take_step().skipped
    after = values_of(run)
    moved = [n for n in before if not torch.equal(before[n].nan_to_num(), after[n].nan_to_num())]
    assert all(name.endswith("router.bias") for name in moved)


def test_a_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    run = make_run()
    run.keep(tmp_path / STATE_FILE)
    other = tiny_config()
    other["text_config"]["intermediate_size"] = 96
    model = build_trainable(other, training_kernels(), 0)
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj"):
        load_state(tmp_path / STATE_FILE, model.module, None)


def test_rates_rise_stay_and_fall() -> None:
    schedule = Schedule(100, 1.0, warm_up=10, fall=0.2)
    rates = [schedule.rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[10:80] == [1.0] * 70
    assert all(later < sooner for sooner, later in pairwise(rates[80:]))


def test_routers_move_toward_even_load() -> None:
    run = make_run()
    run.take_step()
    router = run.model.routers[0]
    with torch.no_grad():
        router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    worst = [run.take_step().worst_load for _ in range(3)]
    assert worst[0] >= 2.0 and router.bias[3] - router.bias[0] < 5.0
