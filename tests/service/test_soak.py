"""Half a minute of everything at once; `benchmarks/soak.py` does the same for as long as asked."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.thorough
def test_a_short_soak_leaves_nothing_behind() -> None:
    command = [sys.executable, str(SOAK), "--seconds", "30", "--clients", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Nothing was wrong.") == 2
