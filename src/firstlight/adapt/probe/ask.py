"""Owns the command that answers one question about a machine in a process of its own.

A driver that crashes or hangs takes this process along, and not the probe. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

# Each module offers `answer(words) -> mapping`; only the one asked for is loaded.
TOPICS = {
    "libraries": "libraries",
    "torch": "torch_report",
    "cards": "cards",
    "answers": "device_answers",
    "collective": "two_ranks",
    "kernels": "kernel_coverage",
    "operations": "model_operations",
    "curves": "curves",
}
NAME = "firstlight.adapt.probe.ask"


def main(words: Sequence[str]) -> int:
    """Prints the answer to the question, or `{"unknown": why}`; returns 0 either way."""
    keep = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the answer
    try:
        module = import_module(f"firstlight.adapt.probe.{TOPICS[words[0]]}")
        found = module.answer(words[1:])
    except Exception as error:  # a process edge: whatever went wrong is the answer
        found = {"unknown": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
    with os.fdopen(keep, "w") as out:
        out.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # some drivers hang at exit
