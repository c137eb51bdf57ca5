"""One rank process of the test pool: runs the functions it is sent, one after another.

Knows nothing of the functions; started by rank_pool as `python rank_worker.py ADDRESS RANK`.
"""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).parents[1]


def main(address: str, rank: int) -> None:
    """Serves the pool until it says stop or goes away."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    connection = Client(address, authkey=bytes.fromhex(os.environ["RANK_POOL_KEY"]))
    connection.send(rank)
    serve(connection, rank)


def serve(connection: Connection, rank: int) -> None:
    """Answers each command with ("ok", value) or ("error", exception, traceback text)."""
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        if command[0] == "stop":
            return
        connection.send_bytes(_answer(command, rank))


def _answer(command: tuple[Any, ...], rank: int) -> bytes:
    try:
        if command[0] == "group":
            return pickle.dumps(("ok", _join_group(rank, *command[1:])))
        _, path, module_name, qualified_name, payload = command
        module = load_module(path, module_name)
        function: Any = module
        for part in qualified_name.split("."):
            function = getattr(function, part)
        args, kwargs = pickle.loads(payload)
        return pickle.dumps(("ok", function(*args, **kwargs)))
    except BaseException as problem:
        return _error(problem)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _error(problem: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        data = pickle.dumps(problem)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(("error", None, text))
    return pickle.dumps(("error", data, text))


def _join_group(rank: int, num_ranks: int, store_path: str, timeout_seconds: float) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < num_ranks:
        dist.init_process_group(
            os.environ["RANK_POOL_BACKEND"],
            init_method=f"file://{store_path}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_seconds),
        )


def load_module(path: str | None, name: str) -> ModuleType:
    """The module of that name; a test module is loaded from its file, as no import path has it."""
    if name in sys.modules:
        return sys.modules[name]
    if path is None or not Path(path).is_relative_to(TESTS):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
