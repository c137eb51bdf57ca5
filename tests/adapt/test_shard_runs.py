"""Conversions that are killed, that run in many threads, or at the same time as another one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from firstlight.adapt import shard_pass
from firstlight.adapt.shard import ShardOptions, shard
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.writer import sole_writer
from firstlight.errors import StoreError, TensorError
from tiny_checkpoints import contents, write_checkpoint, write_weights


class Watcher:
    """A hook that notes the order of units."""

    def __init__(self) -> None:
        self.units: list[str] = []

    def on_unit(self, unit, tensors) -> None:
        assert tensors
        self.units.append(unit)

    def finish(self, store: Path) -> None:
        """Writes nothing."""


CONVERT = """
import os, sys
from pathlib import Path
from firstlight.adapt.shard import ShardOptions, shard
for line in sys.stdin:  # one import of torch serves every run: each is a fork of this process
    child = os.fork()
    if child == 0:
        shard(Path(sys.argv[1]), Path(sys.argv[2]), ShardOptions(dtype=line.strip()))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def converter(tmp_path):
    """A process that converts tmp_path/hf to tmp_path/store once for every line it is given."""
    command = [sys.executable, "-c", CONVERT, str(tmp_path / "hf"), str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env={**os.environ}) as server:
        yield server
        server.stdin.close()


def convert_and_kill(
    server: subprocess.Popen[str], when: Callable[[int], None], dtype: str = "keep"
) -> int:
    """Starts a conversion, kills it when `when(process)` returns; returns its exit code."""
    print(dtype, file=server.stdin, flush=True)
    child = int(server.stdout.readline())
    with suppress(ProcessLookupError, OSError):
        when(child)
        os.kill(child, signal.SIGKILL)
    return int(server.stdout.readline())


def until_files(store: Path, files: int) -> Callable[[int], None]:
    """Waits until a store has so many files."""

    def wait(child: int) -> None:
        while sum(len(names) for _, _, names in os.walk(store)) < files:
            os.kill(child, 0)
            time.sleep(0.0005)

    return wait


def until(moment: float) -> Callable[[int], None]:
    """Waits until a moment, or until the conversion has ended."""

    def wait(child: int) -> None:
        while time.monotonic() < moment:
            os.kill(child, 0)
            time.sleep(0.001)

    return wait


def test_killed_at_any_moment_and_resumed_the_bytes_are_the_same(tmp_path, converter):
    """SIGKILL strikes as soon as some number of files has appeared, then one run may finish."""
    store = tmp_path / "store"
    write_checkpoint(tmp_path / "hf", num_hidden_layers=3, vocab_size=3000)
    shard(tmp_path / "hf", tmp_path / "whole")
    codes = []
    for files in (1, 2, 3, 4, 6, 8, 11, 14):
        codes.append(convert_and_kill(converter, until_files(store, files)))
        if not (store / "COMPLETE").exists():
            with pytest.raises(StoreError):
                open_store(store)
    assert codes.count(-signal.SIGKILL) >= 4
    shard(tmp_path / "hf", store)
    assert contents(store) == contents(tmp_path / "whole")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["keep", "int8"])
def test_thirty_kills_at_random_moments_leave_no_trace(tmp_path, converter, dtype):
    """Every run is killed at some moment of its time; one that ends before is begun anew."""
    store = tmp_path / "store"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 6000, "head_dim": 64}
    write_checkpoint(tmp_path / "hf", num_hidden_layers=8, **sizes)
    shard(tmp_path / "hf", tmp_path / "whole", ShardOptions(dtype=dtype))
    whole, chance, kills, longest = contents(tmp_path / "whole"), random.Random(7), 0, 2.0
    while kills < 30:
        started = time.monotonic()
        moment = started + chance.uniform(0, longest)
        code = convert_and_kill(converter, until(moment), dtype)
        assert code in (0, -signal.SIGKILL)
        kills += code == -signal.SIGKILL
        if (store / "COMPLETE").exists():
            shard(tmp_path / "hf", store, ShardOptions(dtype=dtype))  # killed among last notes
            assert contents(store) == whole
            shutil.rmtree(store)
            longest = max(0.05, min(longest, time.monotonic() - started))
    shard(tmp_path / "hf", store, ShardOptions(dtype=dtype))
    assert contents(store) == whole


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_bytes_are_the_same_however_many_units_are_converted_at_once(tmp_path, threads):
    write_checkpoint(tmp_path / "hf", "llama-bias", num_hidden_layers=5)
    for name, number in (("one", 1), ("many", threads)):
        hook = Watcher()
        options = ShardOptions(threads=number, hook=hook)
        shard(tmp_path / "hf", tmp_path / name, options)
        assert hook.units == ["embed", *(f"layer-00{n}" for n in range(5)), "head"]
        shard(tmp_path / "hf", tmp_path / f"{name} plain", ShardOptions(threads=number))
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    assert contents(tmp_path / "one plain") == contents(tmp_path / "many plain")


def test_an_error_in_one_thread_ends_all_and_is_the_one_that_is_raised(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    tensors = write_checkpoint(tmp_path / "hf", num_hidden_layers=6, **sizes)
    tensors["model.layers.4.mlp.up_proj.weight"][3, 3] = torch.nan
    write_weights(tmp_path / "hf", tensors)
    with pytest.raises(TensorError, match=r"layers\.4\.mlp\.up_proj\.weight.*not finite"):
        shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype="int8", threads=4))
    assert not list((tmp_path / "store/units").glob("*.partial"))


def test_what_tiles_take_together_is_bounded_however_many_threads(tmp_path, monkeypatch):
    """Room for two tiles: never do more than two pass at once."""
    write_checkpoint(tmp_path / "hf", num_hidden_layers=6)
    monkeypatch.setattr(shard_pass, "WORK_BYTES", 2 * 4 * 48 * 16 * 4)
    monkeypatch.setattr(shard_pass, "work_bytes", lambda part, tile: 4 * 48 * 16 * 4)
    now, most, lock = [0], [0], threading.Lock()

    def counted(*arguments, **named):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.001)
        with lock:
            now[0] -= 1
        return read(*arguments, **named)

    read = shard_pass.read_tile
    monkeypatch.setattr(shard_pass, "read_tile", counted)
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(threads=6))
    assert most[0] == 2


def test_a_second_run_into_one_directory_says_who_is_there(tmp_path):
    write_checkpoint(tmp_path / "hf")
    with sole_writer(tmp_path / "store"):
        who = f"another `firstlight shard` \\(process {os.getpid()} on "
        with pytest.raises(StoreError, match=who):
            shard(tmp_path / "hf", tmp_path / "store")
    shard(tmp_path / "hf", tmp_path / "store")
    assert open_store(tmp_path / "store").manifest.units


def test_two_runs_into_one_directory_at_once_make_one_store(tmp_path):
    """One makes it; the other says so, or finds it finished. Nothing is mixed up."""
    write_checkpoint(tmp_path / "hf", num_hidden_layers=4)
    shard(tmp_path / "hf", tmp_path / "whole")
    for _ in range(5):
        with ThreadPoolExecutor(3) as pool:
            runs = [pool.submit(shard, tmp_path / "hf", tmp_path / "store") for _ in range(3)]
        errors = [run.exception() for run in runs]
        assert None in errors
        assert all(e is None or "another `firstlight shard`" in str(e) for e in errors)
        assert contents(tmp_path / "store") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "store")
