"""A start on an accelerator is checked, and refused, without torch in the process that serves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).parent.parent / "data" / "k3" / "checkpoint"
MIB = 2**20
CODE = """
import sys
from firstlight.cli.main import main
code = main(["serve", sys.argv[1], "--device", "musa", "--port", "0", *sys.argv[2:]])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        (("--kv-budget-bytes", "1K"), {}, "the budget is 1 KiB"),
        ((), {"EMULATED_MUSA_MEMORY": str(4 * MIB)}, "short by"),
        ((), {"EMULATED_MUSA_ARCH": "21"}, "is not served"),
    ],
)
def test_refusals_come_without_torch(
    emulated_variables: dict[str, str],
    flags: tuple[str, ...],
    variables: dict[str, str],
    words: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(CHECKPOINT), "--dtype", "bfloat16", *flags],
        env={**os.environ, **emulated_variables, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["4", "False"], done.stderr
    assert words in done.stderr and done.stderr.count("\n") == 1
