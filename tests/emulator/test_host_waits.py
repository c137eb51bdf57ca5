"""How often the host waits for the device in a step: not once more for another layer."""

from pathlib import Path
from typing import Any

import torch

from local_engine import EngineShape, LocalEngine, greedy
from tiny_models import tiny_config, write_checkpoint


def waits_of_a_step(folder: Path) -> tuple[int, list[int]]:
    """Waits of one decoding step with the plain operations, and the answer."""
    from musa_emulator import control

    engine = LocalEngine(folder, EngineShape(num_blocks=32), device=torch.device("musa:0"))
    name = engine.submit(list(range(5, 45)), greedy(6))
    engine.step()
    engine.step()
    before = control.host_waits()
    engine.step()
    found = control.host_waits() - before
    while engine.step():
        pass
    return found, engine.outcomes[name].token_ids


def test_a_deeper_model_makes_the_host_wait_no_more_often(emulated: Any, tmp_path: Path) -> None:
    found = []
    for layers in (2, 6):
        folder = tmp_path / str(layers)
        write_checkpoint(folder, tiny_config("llama3", num_hidden_layers=layers))
        waits, answer = emulated().run(waits_of_a_step, folder)[0]
        assert answer == LocalEngine(folder).run([list(range(5, 45))], greedy(6))[0].token_ids
        found.append(waits)
    assert 0 < found[0] == found[1], found
