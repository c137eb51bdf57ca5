"""Starts that cannot work: the exit code, a message with a way out, and no weight read before."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from live_service import COMMAND

Ended = subprocess.CompletedProcess[str]


def start(model: Path, *flags: str, **environment: str) -> Ended:
    """Runs `firstlight serve` to its end."""
    return subprocess.run(
        [*COMMAND, str(model), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def check_refused(done: Ended, code: int, *words: str) -> None:
    """One line says what is wrong; nothing was started."""
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert "listening" not in done.stderr


def test_a_port_in_use(tiny_store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_refused(start(tiny_store, "--port", port), 4, f"port {port}", "in use", "--port")


@pytest.mark.parametrize("tp", ["3", "16"])
def test_a_degree_the_model_cannot_be_cut_into(tiny_store: Path, tp: str) -> None:
    done = start(tiny_store, "--port", "0", "--tp", tp)
    check_refused(done, 3, f"tp {tp}", "legal tp for this model: 1, 2, 4, 8")


def test_a_context_longer_than_the_models(tiny_store: Path) -> None:
    done = start(tiny_store, "--port", "0", "--context", "8193")
    check_refused(done, 2, "8193", "8192")


def test_a_cache_budget_too_small_for_one_sequence(tiny_store: Path) -> None:
    done = start(tiny_store, "--port", "0", "--kv-budget-bytes", "1MiB")
    check_refused(done, 4, "one sequence of 8192 tokens needs", "Raise the budget to", "lower the")


def test_the_ways_out_of_a_small_budget_work(tiny_store: Path, start_service: object) -> None:
    done = start(tiny_store, "--port", "0", "--kv-budget-bytes", "1MiB")
    tokens = done.stderr.split("lower the context to ")[1].split()[0]
    service = start_service(tiny_store, "--kv-budget-bytes", "1MiB", "--context", tokens)  # type: ignore[operator]
    startup = service.wait_ready().get("/startup").json()
    assert startup["facts"]["kv_tokens"] == int(tokens)


def test_a_weights_budget_too_small_for_the_layers_to_take_turns(tiny_store: Path) -> None:
    done = start(tiny_store, "--port", "0", "--weights-budget", "64KiB")
    check_refused(done, 4, "weights budget of 64 KiB", "at least", "buffers", "--weights-budget")


def test_no_torch(tiny_store: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    check_refused(start(tiny_store, "--port", "0", PYTHONPATH=path), 4, "torch is not installed")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    check_refused(start(tmp_path / "missing", "--port", "0"), 3, "missing")
